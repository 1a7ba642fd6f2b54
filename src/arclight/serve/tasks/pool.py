"""Divide the cores among requests to one program by requests per second.

The choice is between one request on all cores, and several at once on fewer each. `models` calls `pooled` as it loads a program of our export
for the first time; a program that replaces another takes over what was found. Fields of `Pool` and `PoolRate` are in ``GET /models`` and
stay.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.other_runtime import drawn
from arclight.serve.admission import LatencyWindow
from arclight.serve.tasks.tensors import zeros

if TYPE_CHECKING:
    from arclight.deploy import Program

log = logging.getLogger("arclight.serve")
Array = np.ndarray[Any, Any]
Share = tuple[int, int]
"""Requests at once, and the CPU threads of each."""

BUDGET_S = 2.0
"""Most seconds for opening a program again and measuring it: what would take longer is not begun."""
BURST_S = 0.05
"""Least seconds of computing in one measurement."""
ROUNDS = 5
"""Most rounds of measuring, each of all shares in turn."""
GAIN = 1.1
"""Another share is taken if it gives at least this many times the requests per second of the share without a measurement."""
POOLED = ("onnxruntime", "openvino", "openvino-bf16")
"""Runtimes with threads of their own; torch's threads are shared by the whole process."""


@dataclass(frozen=True, kw_only=True)
class PoolRate:
    """Requests per second with ``requests`` at once on ``threads`` CPU threads each, a median."""

    requests: int
    threads: int
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Share of the cores that each request to a program has."""

    requests: int
    """Requests that are computed at once; others wait for their turn."""
    threads: int
    """CPU threads of each."""
    measured: tuple[PoolRate, ...] = ()
    """Rates measured at the load; empty if a setting has decided, or if the share was measured in another runtime."""


def shares(workers: int, cores: int) -> list[Share]:
    """Return the shares to measure, from one request on all cores to one on each core.

    There are at most as many at once as workers.
    """
    most = min(workers, cores)
    between = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [(count, cores // count) for count in dict.fromkeys((1, most, *between))]


def pooled(
    program: Program,
    *,
    workers: int,
    cores: int,
    load_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Program, Pool | None]:
    """Return ``program`` with the best share of the cores, and what was measured.

    It is opened again for each other share, and that with the most requests per second is kept if it gains `GAIN`.

    ``program`` is open as without a measurement; opening it took ``load_s`` seconds. It is returned as it is, with None, if one core or one
    worker leaves no choice, if a call is so short that the event loop computes it, if opening it again and calling it would take longer than
    `BUDGET_S`, if it fails on its inputs, and unless it is of our export (the sizes of its inputs bound what it computes), in one of `POOLED`
    and on the CPU.
    """
    options = shares(workers, cores)
    is_ours = "parity" in program.metadata and program.runtime in POOLED and program.device == "cpu"
    if len(options) == 1 or not is_ours:
        return program, None
    # without a measurement OpenVINO computes one call after another, on all cores
    usual = options[1] if program.runtime == "onnxruntime" else options[0]
    started = clock()
    try:
        given = next(iter(drawn(program)), None) or zeros(program)
        program(*given)  # the first call allocates
        before = clock()
        program(*given)
        call_s = clock() - before
        if call_s < LatencyWindow.QUICK_S:
            return program, None
        calls = {option: max(2, math.ceil(BURST_S / call_s / option[0])) for option in options}
        # of a round, if several at once gain nothing
        longest_s = {option: option[0] * calls[option] * call_s for option in options}
        opened = {usual: program.with_requests(usual[0])}
        for option in options:
            planned_s = sum(longest_s[one] for one in {*opened, option})
            if option not in opened and clock() - started + load_s + 2 * planned_s <= BUDGET_S:
                opened[option] = program.with_threads(option[1], requests=option[0])
        if len(opened) == 1:
            return program, None
        left_s = BUDGET_S - (clock() - started)
        rounds = max(1, min(ROUNDS, int(left_s / sum(longest_s[option] for option in opened)) - 1))
        rates = measure(opened, given, calls, rounds, clock)
    except ProgramError as error:  # such as of a program that takes no batch of one
        log.warning("%s was not measured with several requests at once: %s", program.path.name, error)
        return program, None
    best = max(rates, key=lambda option: rates[option])
    if rates[best] < GAIN * rates[usual]:
        best = usual
    measured = tuple(
        PoolRate(requests=option[0], threads=option[1], requests_per_s=round(rates[option], 1))
        for option in sorted(rates)
    )
    return opened[best], Pool(requests=best[0], threads=best[1], measured=measured)


def measure(
    opened: Mapping[Share, Program],
    given: Sequence[Array],
    calls: Mapping[Share, int],
    rounds: int,
    clock: Callable[[], float],
) -> dict[Share, float]:
    """Return the median requests per second of each share.

    In each round, every thread of a share makes its number of ``calls``.
    """
    found: dict[Share, list[float]] = {share: [] for share in opened}
    with ExitStack() as stack:
        threads = {share: stack.enter_context(ThreadPoolExecutor(share[0])) for share in opened}
        for share, program in opened.items():
            _burst(program, given, share[0], 1, threads[share])  # OpenVINO makes a request for each thread
        for _ in range(rounds):
            for share, program in opened.items():  # in turn: what else the machine does meets all of them
                before = clock()
                _burst(program, given, share[0], calls[share], threads[share])
                found[share].append(share[0] * calls[share] / (clock() - before))
    return {share: statistics.median(rates) for share, rates in found.items()}


def _burst(program: Program, given: Sequence[Array], requests: int, calls: int, threads: ThreadPoolExecutor) -> None:
    """Call ``program`` from ``requests`` threads at once, ``calls`` times each."""
    together = threading.Barrier(requests)

    def compute() -> None:
        together.wait()
        for _ in range(calls):
            program(*given)

    for done in [threads.submit(compute) for _ in range(requests)]:
        done.result()
