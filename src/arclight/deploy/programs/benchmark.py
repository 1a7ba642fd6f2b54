"""Time programs and models beside each other: interleaved runs, medians, ratios and spread.

`benchmark` is public and behind ``arclight benchmark`` and ``demo``; `formats.export`, `comparison` and ``verifying.verify`` time by it, too. A round
calls every contender once, so that drift of the machine cancels: keep that. Names of figures (`Row.figures`, `Table.json`) are in reports and must
stay.
"""

from __future__ import annotations

import copy
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

from arclight.deploy.capture import (
    Inputs,
    as_copy_inputs,
    as_inputs,
    batch_size,
    check_shared_batch,
    frozen_copy,
    resized,
)
from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.fresh import FreshRun, run_fresh
from arclight.deploy.programs.program import Program
from arclight.deploy.programs.session import NAMES
from arclight.deploy.quantizing.ptq import QuantizedModel

WARM_UP = 3
"""Warm-up calls of each program, which are not counted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One program's figures at one batch size and number of threads; times are of one call."""

    name: str
    batch: int
    """Samples of a call."""
    threads: int
    device: str | None
    """Device that it ran on, such as cpu or cuda:0; None for a callable, which does not say."""
    runtime: str | None
    """Name of the runtime of a program; None for models and callables."""
    wall_ms: float
    """Median wall time (p50), milliseconds."""
    p99_ms: float
    """99th percentile of the same; with fewer than a hundred rounds nearly the maximum."""
    cpu_ms: float
    """Median CPU time of all threads of this process, milliseconds; the steadier figure on a busy machine."""
    samples_per_s: float
    """Samples of a call over its median wall time."""
    speedup: float
    """Median over rounds of the first program's wall time divided by this one's."""
    speedup_low: float
    """10th percentile of the same."""
    speedup_high: float
    """90th percentile of the same."""
    nbytes: int | None
    """Bytes of a program's files, or of a model's weights and buffers; None for other callables."""
    build_s: float | None = None
    """Seconds that capture, quantization and writing of a program took together, as its description says; None if it does not."""
    load_s: float | None = None
    """Seconds to check and load a program in a process of its own; None without ``fresh``, or for what is no program."""
    peak_bytes: int | None = None
    """Bytes that this process held at most while it loaded and ran the program, the runtime's libraries included; None as for ``load_s``."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further columns, such as an accuracy."""

    @property
    def figures(self) -> dict[str, float]:
        """Return the numbers by name; those that there are none of are left out."""
        names = (
            "wall_ms", "p99_ms", "cpu_ms", "samples_per_s", "speedup", "speedup_low", "speedup_high", "nbytes", "build_s", "load_s", "peak_bytes",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names} | dict(self.extra)
        on_cuda = {} if self.device is None else {"cuda": int(self.device.startswith("cuda"))}
        return {name: value for name, value in values.items() if value is not None} | on_cuda


@dataclass(frozen=True, kw_only=True)
class Table:
    """The result of ``benchmark``; ``rich.print`` shows it and ``json`` gives its numbers."""

    rows: tuple[Row, ...]
    """The programs in order, for each number of threads and batch size."""
    rounds: int
    threads: int
    """CPU threads of the first rows."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the inputs of the first rows."""

    def __getitem__(self, name: str) -> Row:
        """Return the first row of a program."""
        return next(row for row in self.rows if row.name == name)

    def with_column(self, title: str, values: Mapping[str, float]) -> Table:
        """Return the table with one more column: ``values`` by program name."""
        rows = (
            replace(row, extra={**row.extra, title: values[row.name]}) if row.name in values else row
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))

    @property
    def _several(self) -> bool:
        return len({(row.batch, row.threads) for row in self.rows}) > 1

    def json(self) -> dict[str, float]:
        """Return one flat object by ``<name>/<figure>``.

        With several batch sizes or threads the keys are such as ``<name>/batch 8/threads 2/<figure>``.
        """
        flat: dict[str, float] = {}
        for row in self.rows:
            place = f"{row.name}/batch {row.batch}/threads {row.threads}" if self._several else row.name
            flat |= {f"{place}/{name}": value for name, value in row.figures.items()}
        return flat

    def __rich__(self) -> RichTable:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes[:3])
        shapes += f" and {len(self.shapes) - 3} more" if len(self.shapes) > 3 else ""
        plural = "" if self.threads == 1 else "s"
        setting = "" if self._several else f", {self.threads} thread{plural}, input {shapes}"
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=f"{self.rounds} interleaved calls{setting}")
        columns = [(title, cells) for title, cells in self._columns() if any(cells)]
        for title, _ in columns:
            name = title == "program"
            table.add_column(title, justify="left" if name else "right", overflow="fold", no_wrap=not name)
        for place in range(len(self.rows)):
            table.add_row(*(cells[place] for _, cells in columns))
        return table

    def _columns(self) -> list[tuple[str, list[str]]]:
        """Return titles and cells; a column without a text is not shown."""

        def column(title: str, cell: Callable[[Row], str], shown: bool = True) -> tuple[str, list[str]]:
            return title, [cell(row) if shown else "" for row in self.rows]

        def megabytes(size: int | None, digits: int) -> str:
            return "" if size is None else f"{size / 1e6:.{digits}f}"

        others = any(row.runtime not in (None, NAMES["onnxruntime"]) for row in self.rows)
        on_cuda = any((row.device or "").startswith("cuda") for row in self.rows)
        extras = list(dict.fromkeys(title for row in self.rows for title in row.extra))
        return [
            column("program", lambda row: row.name),
            column("runtime", lambda row: row.runtime or "-", others),
            column("on", lambda row: row.device or "-", on_cuda),
            column("batch", lambda row: str(row.batch), self._several),
            column("threads", lambda row: str(row.threads), self._several),
            column("size MB", lambda row: megabytes(row.nbytes, 2)),
            *(column(title, lambda row, of=title: f"{row.extra[of]:.4g}" if of in row.extra else "") for title in extras),  # type: ignore[misc]
            column("p50 ms", lambda row: f"{row.wall_ms:.2f}"),
            column("p99 ms", lambda row: f"{row.p99_ms:.2f}"),
            column("CPU ms", lambda row: f"{row.cpu_ms:.2f}"),
            column("samples/s", lambda row: f"{row.samples_per_s:.4g}"),
            column("speed-up", lambda row: f"{row.speedup:.2f} x"),
            column("10-90 %", lambda row: f"{row.speedup_low:.2f}-{row.speedup_high:.2f}"),
            column("build s", lambda row: "" if row.build_s is None else f"{row.build_s:.2f}"),
            column("load s", lambda row: "" if row.load_s is None else f"{row.load_s:.2f}"),
            column("peak MB", lambda row: megabytes(row.peak_bytes, 0)),
        ]  # fmt: skip


def benchmark(
    programs: Mapping[str, Callable[..., Any]],
    inputs: Tensor | Sequence[Tensor],
    *,
    rounds: int = 30,
    threads: int | Sequence[int] = 1,
    batch_sizes: Sequence[int] | None = None,
    fresh: bool = False,
) -> Table:
    """Benchmark ``programs`` on ``inputs``, one call each per round, on ``threads`` CPU threads.

    A ``Program`` runs on NumPy arrays, on the device that it was loaded on, with floating-point inputs in float32 where it takes
    that; an ``nn.Module`` runs as a copy in evaluation mode without
    gradients, in float32 on the CPU (inputs in the type of its weights, too), or as it is on the CUDA device that holds its weights; any other
    callable gets the tensors as they are. A call
    on CUDA lasts until the device has finished. ``inputs`` are of any dtype, such as token ids. ``batch_sizes``: time each of these, the
    samples of ``inputs`` repeated in order, and with several ``threads`` each of all pairs. ``fresh``: also load and run every
    Program in a process of its own, which says how long loading takes and what memory it needs.

    Ratios are taken within a round, against the first program, so that what slows the machine for a while slows both sides. Three
    calls each go uncounted before. Raises ProgramError, before anything is timed, for a program that does not take the inputs.
    """
    counts = (threads,) if isinstance(threads, int) else tuple(threads)
    given = as_inputs(inputs)
    if not programs or rounds < 1 or not counts or min(counts) < 1:
        raise ValueError(f"benchmark needs programs, rounds and threads, got {list(programs)}, {rounds}, {threads}")
    if batch_sizes is not None:
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes are 1 or more samples each, got {list(batch_sizes)}")
        batch_size(given)
        check_shared_batch(given)
    batches = [given] if batch_sizes is None else [resized(given, size) for size in batch_sizes]
    for name, program in programs.items():
        for tensors in batches:
            _check_inputs(name, program, tensors)
    rows = [row for count in counts for tensors in batches for row in _rows(programs, tensors, rounds, count, fresh)]
    shapes = tuple(tuple(tensor.shape) for tensor in batches[0])
    return Table(rows=tuple(rows), rounds=rounds, threads=counts[0], shapes=shapes)


def as_program_inputs(program: Program, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Cast floating-point ``inputs`` to float32 where ``program`` takes that.

    Its model may take them in other types.
    """
    if len(inputs) != len(program.inputs):
        return inputs
    single = [spec.dtype == "float32" for spec in program.inputs]
    return [value.float() if cast and value.is_floating_point() else value for cast, value in zip(single, inputs)]


def _check_inputs(name: str, program: Callable[..., Any], tensors: Inputs) -> None:
    """Raise ProgramError if ``program`` does not take ``tensors``.

    Raises ValueError for a model on a device that is not timed.
    """
    if not isinstance(program, Program):
        _device_of(name, program)
        return
    if len(program.inputs) != len(tensors):
        wanted = ", ".join(map(str, program.inputs))
        raise ProgramError(f"{name} takes {len(program.inputs)} inputs ({wanted}), and {len(tensors)} are given")
    for spec, tensor in zip(program.inputs, as_program_inputs(program, tensors)):
        try:
            spec.check(tensor)
        except ProgramError as error:
            raise ProgramError(f"{name} cannot be timed on these inputs: {error}") from error


def _rows(
    programs: Mapping[str, Callable[..., Any]], tensors: Inputs, rounds: int, threads: int, fresh: bool
) -> Iterator[Row]:  # fmt: skip
    """Time the programs in one setting."""
    batch = batch_size(tensors)
    costs = {
        name: run_fresh(
            program.with_threads(threads), [[tensor.numpy() for tensor in as_program_inputs(program, tensors)]]
        )
        for name, program in programs.items()
        if fresh and isinstance(program, Program)
    }
    with _torch_threads(threads), torch.inference_mode():
        calls = {name: _call(name, program, tensors, threads) for name, program in programs.items()}
        for name, call in calls.items():
            with _type_named(name, programs[name], tensors):
                for _ in range(WARM_UP):
                    call()
        times = np.array([[_timed(call) for call in calls.values()] for _ in range(rounds)])  # (rounds, programs, 2)
    wall, cpu = times[..., 0] * 1e3, times[..., 1] * 1e3
    speedup = wall[:, :1] / wall
    for i, (name, program) in enumerate(programs.items()):
        median, cost = float(np.median(wall[:, i])), costs.get(name)
        yield Row(
            name=name,
            batch=batch,
            threads=threads,
            device=_device_of(name, program),
            runtime=NAMES[program.runtime] if isinstance(program, Program) else None,
            wall_ms=median,
            p99_ms=float(np.quantile(wall[:, i], 0.99)),
            cpu_ms=float(np.median(cpu[:, i])),
            samples_per_s=1e3 * batch / median if median else 0.0,
            speedup=float(np.median(speedup[:, i])),
            speedup_low=float(np.quantile(speedup[:, i], 0.1)),
            speedup_high=float(np.quantile(speedup[:, i], 0.9)),
            nbytes=_nbytes(program),
            build_s=_build_s(program),
            **_cost(cost),
        )


@contextmanager
def _type_named(name: str, program: Callable[..., Any], tensors: Inputs) -> Iterator[None]:
    """Raise ProgramError, in place of torch's error, for inputs in another type than weights."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(program, nn.Module):
            raise
        given = {value.dtype for value in tensors if value.is_floating_point()}
        weights = {value.dtype for value in program.parameters() if value.is_floating_point()}
        if not weights or given <= weights:
            raise
        named = [", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types)) for types in (given, weights)]
        raise ProgramError(
            f"{name} cannot be timed on these inputs: they are {named[0]}, and its weights are {named[1]}; give inputs and models of one type"
        ) from error


def _build_s(program: Callable[..., Any]) -> float | None:
    steps = program.metadata.get("build_s") if isinstance(program, Program) else None
    return sum(steps.values()) if steps else None


def _cost(run: FreshRun | None) -> dict[str, Any]:
    return {} if run is None else {"load_s": run.load_s, "peak_bytes": run.peak_bytes}


def _device_of(name: str, program: Callable[..., Any]) -> str | None:
    """Return the device of ``program``; None for a callable.

    Raises ValueError for a model on several devices, or on one that is not timed.
    """
    if isinstance(program, Program):
        return program.device
    if not isinstance(program, nn.Module):
        return None
    module: Any = program.graph if isinstance(program, QuantizedModel) else program
    devices = sorted({str(value.device) for value in (*module.parameters(), *module.buffers())})
    if len(devices) > 1:
        raise ValueError(
            f"{name} has weights on {', '.join(devices)}, and a model is timed on one device: move it to one"
        )
    device = devices[0] if devices else "cpu"
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {device}, and models are timed on the CPU or on CUDA: move it to one of them")
    return device


def _call(name: str, program: Callable[..., Any], tensors: Inputs, threads: int) -> Callable[[], Any]:
    """Bind ``program`` to inputs of the kind it takes; on CUDA a call waits for the device."""
    if isinstance(program, Program):  # it returns arrays of this process, so its device has finished by then
        pinned = program.with_threads(threads)
        arrays = [tensor.numpy() for tensor in as_program_inputs(program, tensors)]
        return lambda: pinned(*arrays)
    device = _device_of(name, program)
    if device is None:
        return lambda: _finished(program(*tensors), None)
    assert isinstance(program, nn.Module)
    if device == "cpu":
        frozen = frozen_copy(program)
        taken = as_copy_inputs(program, tensors)
        return lambda: frozen(*taken)
    moved = [tensor.to(device) for tensor in tensors]
    runs = copy.deepcopy(program).eval().requires_grad_(False)
    return lambda: _finished(runs(*moved), device)


def _finished(result: Any, device: str | None) -> Any:
    """Return ``result`` after synchronising with CUDA, if that is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
    return result


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return wall and CPU seconds of one call."""
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
