"""Batch waiting tensor requests into one call of their program, if measured faster.

This is dynamic batching. `models` makes one `Batcher` for each program and measures it before it answers; `app` and ``admission.Workers`` give
it requests. A batched answer may differ from that of a single request by `TOLERANCE` at most, which `measure` checks: programs that exceed
it are not batched. Fields of `BatchCost` are in ``GET /models`` and stay.
"""

from __future__ import annotations

import asyncio
import logging
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.serve.admission import LatencyWindow
from arclight.serve.settings import Limits
from arclight.serve.tasks.tensors import QUIET, TensorRequest, compute, decode, encode

if TYPE_CHECKING:
    from arclight.deploy import Program

log = logging.getLogger("arclight.serve")
Array = np.ndarray[Any, Any]
Encoded = tuple[bytes, int | None]
"""Body of an answer, and the bytes of its JSON if binary tensors follow."""

_BEGINNING = 4096
"""Bytes of a request in which its first shape is looked for."""
_SHAPE = re.compile(rb'"shape"\s*:\s*\[\s*(\d{1,9})')
PAYS = 0.8
"""A batch pays if each of its rows takes at most this share of the time of a single row."""
TOLERANCE = 1e-4
"""Largest difference between a row computed alone and in a batch, as a share of the row's largest element: the bound of float32
exports."""
ROUNDS = 5
BUDGET_S = 0.5
"""Most seconds of timing one program, estimated as if a batch took as long as its rows one by one."""


@dataclass(frozen=True)
class Job:
    """A tensor request that has not been parsed; a call computes it alone."""

    body: bytes | bytearray
    json_size: bytes | None
    program: Program
    model: str
    version: str
    limits: Limits

    def decode(self) -> TensorRequest:
        return decode(self.body, self.json_size, self.program, self.limits)

    def encode(self, request: TensorRequest, outputs: Sequence[Array]) -> Encoded:
        return encode(request, outputs, self.program, self.model, self.version)

    def __call__(self) -> Encoded:
        """Return the answer; raises Refusal 400 or 413."""
        with np.errstate(**QUIET):
            request = self.decode()
        return self.encode(request, compute(self.program, request.inputs))


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """Cost of a batch of a program on this machine, medians."""

    rows: int
    """Rows of the measured batch with the least cost for a row, and the most rows of any batch."""
    one_ms: float
    """Milliseconds of a single row."""
    together_ms: float
    """Milliseconds of ``rows`` rows in one call."""
    largest_difference: float
    """Largest difference between a row alone and in a batch, as a share of the row's largest element; 0 if they are bit-equal."""


class Batcher:
    """Batcher of one program's requests.

    It batches once `measure` has found that this pays and changes answers by `TOLERANCE` at most.
    """

    def __init__(self, most: int = 1, latency: LatencyWindow | None = None) -> None:
        """Initialise the batcher.

        ``most``: most rows of a batch; with 1 none is made. ``latency`` notes the times of small requests.
        """
        self.most = most
        self.measured: BatchCost | None = None
        self._latency = latency or LatencyWindow()
        self._on_batch: Callable[[int], None] = lambda _: None
        self._gathered: list[tuple[Job, Callable[[Encoded | Exception], None]]] = []

    def measure(self, program: Program) -> None:
        """Measure the batch that costs least per row.

        Requests are computed one by one if rows change each other, or if no batch pays.
        """
        self.measured = measure(program, self.most)

    def observe(self, on_batch: Callable[[int], None]) -> None:
        """Call ``on_batch`` with the requests of every call of the program, from any thread."""
        self._on_batch = on_batch

    @property
    def rows(self) -> int:
        """Return the most rows of one batch; 1 if requests are computed one by one."""
        return 1 if self.measured is None else self.measured.rows

    def rows_of(self, job: Job) -> int:
        """Return the rows of the first tensor that a request describes, 1 if none is found.

        Only the beginning of the request is searched.
        """
        shape = _SHAPE.search(job.body, 0, _BEGINNING)
        return max(1, int(shape[1])) if shape else 1

    def run(self, jobs: Sequence[Job]) -> list[Encoded | Exception]:
        """Return an answer or an error for each; an error of one leaves the others alone."""
        started = time.monotonic()
        found: dict[int, Encoded | Exception] = {}
        read: dict[int, TensorRequest] = {}
        with np.errstate(**QUIET):
            for place, job in enumerate(jobs):
                try:
                    read[place] = job.decode()
                except Exception as error:  # which whoever waits for that request raises
                    found[place] = error
        for places in self._batches(read):
            self._compute(jobs, read, places, found)
        if max(len(job.body) for job in jobs) <= LatencyWindow.SMALL_BYTES:
            self._latency.add((time.monotonic() - started) / len(jobs))
        return [found[place] for place in range(len(jobs))]

    async def run_here(self, job: Job) -> Encoded:
        """Return the answer to a quick request, see `add`."""
        done: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()

        def settle(outcome: Encoded | Exception) -> None:
            if done.done():  # cancelled, as the server ends
                return
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        self.add(job, settle)
        return await done

    def add(self, job: Job, on_done: Callable[[Encoded | Exception], None]) -> None:
        """Queue a quick request for the event loop, which batches those of one moment.

        ``on_done`` gets its outcome.
        """
        self._gathered.append((job, on_done))
        if len(self._gathered) == 1:  # after the requests that have arrived and are handled in this pass of the loop
            asyncio.get_running_loop().call_soon(self._run_gathered)

    def _run_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        try:
            outcomes = self.run([job for job, _ in gathered])
        except Exception as error:  # a fault of ours: nobody must wait for ever
            outcomes = [error] * len(gathered)
        for (_, on_done), outcome in zip(gathered, outcomes, strict=True):
            try:
                on_done(outcome)
            except Exception:  # of one connection; the others get their answers
                log.exception("an answer could not be sent")

    def _batches(self, read: dict[int, TensorRequest]) -> list[list[int]]:
        """Divide requests into batches of at most `rows` rows; those that fit into none are alone."""
        batches: list[list[int]] = []
        left = 0
        most = self.rows
        for place, request in read.items():
            size = len(request.inputs[0]) if request.inputs else 0
            if not 0 < size <= most or any(len(value) != size for value in request.inputs):
                batches.insert(0, [place])
                continue
            if size > left or not batches:
                batches.append([])
                left = most
            batches[-1].append(place)
            left -= size
        return batches

    def _compute(
        self,
        jobs: Sequence[Job],
        read: dict[int, TensorRequest],
        places: Sequence[int],
        found: dict[int, Encoded | Exception],
    ) -> None:
        """Compute the requests at ``places`` in one call, each alone if that fails.

        Answers are put into ``found``.
        """
        program, inputs = jobs[places[0]].program, [read[place].inputs for place in places]
        try:
            if len(places) == 1:
                together = compute(program, inputs[0])
            else:
                together = compute(program, [np.concatenate(values) for values in zip(*inputs, strict=True)])
                if any(len(value) != sum(len(values[0]) for values in inputs) for value in together):
                    raise ValueError("an output of the batch has not its rows")
        except Exception as error:
            if len(places) == 1:
                found[places[0]] = error
                return
            log.warning(
                "%s failed on a batch of %d requests, they are computed one by one", program.path.name, len(places)
            )
            for place in places:
                self._compute(jobs, read, [place], found)
            return
        self._on_batch(len(places))
        begin = 0
        for place, values in zip(places, inputs, strict=True):
            end = begin + len(values[0]) if values else 0
            own = together if len(places) == 1 else [value[begin:end] for value in together]
            begin = end
            try:
                found[place] = jobs[place].encode(read[place], own)
            except Exception as error:
                found[place] = error


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(program: Program, most: int) -> BatchCost | None:
    """Measure batches of 2, 4, 8, ... up to ``most`` rows against single rows.

    None if no batch pays, or if rows change each other by more than `TOLERANCE`. None also for a program of another exporter (the sizes of
    its inputs bound nothing), and unless the first dimension of each input and output is dynamic, and of inputs no other.
    """
    if "parity" not in program.metadata or not _is_batched(program):
        return None
    times: dict[int, list[float]] = {}
    single = _rows(program, 1)
    started = time.perf_counter()
    _timed(program, single, 1, times)
    single_s = time.perf_counter() - started
    sizes = [1]
    while 2 * sizes[-1] <= most and ROUNDS * (sum(sizes) + 2 * sizes[-1]) * single_s <= BUDGET_S:
        sizes.append(2 * sizes[-1])
    rows = _rows(program, sizes[-1])  # not ``most``, which may be more than the memory holds
    if len(sizes) == 1 or (difference := _difference(program, rows, sizes[-1])) is None:
        return None
    times.clear()
    for _ in range(ROUNDS):
        for size in sizes:  # in turn: what else the machine does meets all of them
            _timed(program, rows, size, times)
    median_s = {size: statistics.median(found) for size, found in times.items()}
    best = min(sizes, key=lambda size: median_s[size] / size)
    smaller_cost_no_more = all(median_s[size] <= size * median_s[1] for size in sizes if size <= best)
    if median_s[best] > PAYS * best * median_s[1] or not smaller_cost_no_more:
        return None
    return BatchCost(
        rows=best,
        one_ms=round(median_s[1] * 1000, 3),
        together_ms=round(median_s[best] * 1000, 3),
        largest_difference=difference,
    )


def _is_batched(program: Program) -> bool:
    """Return True if the first dimension of inputs and outputs is dynamic, no other of inputs."""
    firsts = [spec.shape[:1] for spec in (*program.inputs, *program.outputs)]
    fixed = all(isinstance(size, int) for spec in program.inputs for size in spec.shape[1:])
    return fixed and all(first and isinstance(first[0], str) for first in firsts)


def _rows(program: Program, count: int) -> list[Array]:
    """Return inputs of ``count`` rows of different scales, up to 64 times each other.

    A program that rounds all rows by one shared scale then gives other numbers in a batch. One-byte integers are taken for magnitudes, such
    as of pixels; wider ones may be token ids, of which only 0 and 1 are sure to exist.
    """
    random = np.random.default_rng(0)
    found = []
    for spec in program.inputs:
        shape, dtype = (count, *map(int, spec.shape[1:])), np.dtype(spec.dtype)
        scale = (4 ** (np.arange(count) % 4)).reshape(-1, *[1] * (len(shape) - 1))
        values: Array = random.standard_normal(shape) * scale
        if dtype.kind != "f":
            values = random.integers(0, 2 * scale if dtype in (np.uint8, np.int8) else 2, shape)
        found.append(values.astype(spec.dtype))
    return found


def _timed(program: Program, rows: list[Array], size: int, times: dict[int, list[float]]) -> None:
    given = [value[:size] for value in rows]
    started = time.perf_counter()
    program(*given)
    times.setdefault(size, []).append(time.perf_counter() - started)


def _difference(program: Program, rows: list[Array], size: int) -> float | None:
    """Return the largest difference between rows alone and in a batch; None beyond `TOLERANCE`.

    A difference is a share of its row's largest element.
    """
    together = compute(program, [value[:size] for value in rows])
    worst = 0.0
    for row in range(size):
        alone = compute(program, [value[row : row + 1] for value in rows])
        for one, other in zip(alone, together, strict=True):
            if len(other) != size:
                return None
            a, b = one[0], other[row]
            if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                continue
            if a.dtype.kind != "f" or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
                return None
            worst = max(
                worst, float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(a).max(), np.finfo(a.dtype).tiny))
            )
    return worst if worst <= TOLERANCE else None
