"""Time programs beside each other: interleaved runs, medians, and ratios with their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table as RichTable
from torch import Tensor, nn

from arclight.deploy.capture import as_inputs, frozen_copy
from arclight.deploy.programs.program import Program
from arclight.deploy.quantizing.ptq import QuantizedModel


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program's figures; times are of one call."""

    name: str
    wall_ms: float
    """Median wall time, milliseconds."""
    cpu_ms: float
    """Median CPU time of all threads of this process, milliseconds; the steadier figure on a busy machine."""
    speedup: float
    """Median over rounds of the first program's wall time divided by this one's."""
    speedup_low: float
    """10th percentile of the same."""
    speedup_high: float
    """90th percentile of the same."""
    nbytes: int | None
    """Size of the file, or of a model's weights; none where unknown."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further columns, such as an accuracy."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The result of ``benchmark``; ``rich.print`` shows it and ``json`` gives its numbers."""

    rows: tuple[Row, ...]
    rounds: int
    threads: int
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the inputs."""

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def with_column(self, title: str, values: Mapping[str, float]) -> Table:
        """Return the table with one more column: ``values`` by program name."""
        rows = (
            replace(row, extra={**row.extra, title: values[row.name]}) if row.name in values else row
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))

    def json(self) -> dict[str, float]:
        """Return one flat object: ``<name>/<figure>`` to number."""
        flat: dict[str, float] = {}
        for row in self.rows:
            figures = ("wall_ms", "cpu_ms", "speedup", "speedup_low", "speedup_high", "nbytes")
            values = {figure: getattr(row, figure) for figure in figures} | dict(row.extra)
            flat |= {f"{row.name}/{figure}": value for figure, value in values.items() if value is not None}
        return flat

    def __rich__(self) -> RichTable:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        plural = "" if self.threads == 1 else "s"
        table = RichTable(
            box=box.SIMPLE_HEAD,
            caption=f"medians of {self.rounds} interleaved calls, {self.threads} thread{plural}, input {shapes}",
        )
        extras = list(dict.fromkeys(title for row in self.rows for title in row.extra))
        table.add_column("program")
        for title in ("size MB", *extras, "wall ms", "CPU ms", "speed-up", "10-90 %"):
            table.add_column(title, justify="right")
        for row in self.rows:
            table.add_row(
                row.name,
                "" if row.nbytes is None else f"{row.nbytes / 1e6:.2f}",
                *(f"{row.extra[title]:.4g}" if title in row.extra else "" for title in extras),
                f"{row.wall_ms:.2f}",
                f"{row.cpu_ms:.2f}",
                f"{row.speedup:.2f} x",
                f"{row.speedup_low:.2f}-{row.speedup_high:.2f}",
            )
        return table


def benchmark(
    programs: Mapping[str, Callable[..., Any]],
    inputs: Tensor | Sequence[Tensor],
    *,
    rounds: int = 30,
    threads: int = 1,
) -> Table:
    """Time each of ``programs`` on ``inputs``, one call in turn per round, on ``threads`` CPU threads.

    A ``Program`` runs on NumPy arrays; an ``nn.Module`` runs as a copy in evaluation mode without gradients; any other
    callable gets the tensors as they are. Ratios are taken within a round, against the first program, so that what
    slows the machine for a while slows both sides. Three calls each go uncounted before.
    """
    if not programs or rounds < 1 or threads < 1:
        raise ValueError(f"benchmark needs programs, rounds and threads, got {list(programs)}, {rounds}, {threads}")
    tensors = as_inputs(inputs)
    with _torch_threads(threads), torch.inference_mode():
        calls = {name: _call(program, tensors, threads) for name, program in programs.items()}
        for call in calls.values():
            for _ in range(3):
                call()
        times = np.array([[_timed(call) for call in calls.values()] for _ in range(rounds)])  # (rounds, programs, 2)
    wall, cpu = times[..., 0] * 1e3, times[..., 1] * 1e3
    speedup = wall[:, :1] / wall
    rows = (
        Row(
            name=name,
            wall_ms=float(np.median(wall[:, i])),
            cpu_ms=float(np.median(cpu[:, i])),
            speedup=float(np.median(speedup[:, i])),
            speedup_low=float(np.quantile(speedup[:, i], 0.1)),
            speedup_high=float(np.quantile(speedup[:, i], 0.9)),
            nbytes=_nbytes(program),
        )
        for i, (name, program) in enumerate(programs.items())
    )
    return Table(
        rows=tuple(rows), rounds=rounds, threads=threads, shapes=tuple(tuple(tensor.shape) for tensor in tensors)
    )


def _call(program: Callable[..., Any], tensors: tuple[Tensor, ...], threads: int) -> Callable[[], Any]:
    """``program`` bound to inputs of the kind it takes."""
    if isinstance(program, Program):
        pinned, arrays = program.with_threads(threads), [tensor.numpy() for tensor in tensors]
        return lambda: pinned(*arrays)
    runs = frozen_copy(program) if isinstance(program, nn.Module) else program
    return lambda: runs(*tensors)


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _nbytes(program: Callable[..., Any]) -> int | None:
    if isinstance(program, Program):
        return program.nbytes
    module = program.graph if isinstance(program, QuantizedModel) else program
    if not isinstance(module, nn.Module):
        return None
    return sum(value.nbytes for value in (*module.parameters(), *module.buffers()))


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
