"""Partition a chain of units into stages: the exact cut of the shortest step that fits.

`split`, `candidates` and `layer_pruning` call it. Costs come in, cuts go out; the same costs must give the same cuts on all ranks.

A stage s with units i to j takes w(i, j) seconds for a micro-batch: what its units compute, and what it waits for - its input, and
the gradient of its output, as they cross the two cuts beside it. A step of m micro-batches is predicted to take

    sum over stages of (w + e) + (m - 1) * max over stages of w,

the first micro-batch passing all stages and the slowest stage setting the pace of the others (Zheng et al. 2022, "Alpa",
equation 4, with transfers), where e are exchanges of gradients of parameters that several stages use, once in a step.
For a bound t on the slowest stage the least sum is found by dynamic programming over ends of stages. That is done for t = the
least possible and for t = infinity, and between them wherever the sum could still fall by more than the pace rises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.parallel.pipeline.unit_costs import Link, Tie, UnitCost
from arclight.parallel.plan import PlanError

Array = npt.NDArray[Any]
EQUAL = 1e-12
"""Relative difference below which two times count as equal: they are sums of the same numbers in another order."""


@dataclass(frozen=True)
class MemoryLimit:
    """Limit on what a stage holds: states of its parameters, and activations in flight."""

    cap: float
    """Bytes."""
    in_flight: tuple[float, ...]
    """Most micro-batches whose activations each stage holds at once."""
    states: float = 4.0
    """Bytes for each byte of parameters: weights, gradients and two moments of an optimizer."""


class MemoryLimitError(PlanError):
    """No cut keeps all stages within the limit."""

    def __init__(self, message: str, least: float, cuts: tuple[int, ...]) -> None:
        """Initialise the error.

        least: the least cap in bytes with which ``cuts``, and no others with less, would do.
        """
        super().__init__(message)
        self.least, self.cuts = least, cuts


@dataclass(frozen=True)
class Partition:
    """Chain cut into stages, with predictions."""

    cuts: tuple[int, ...]
    """The first unit of each stage."""
    seconds: float
    """Seconds of a step, by the formula above."""
    stages: tuple[float, ...]
    """Seconds of each stage for one micro-batch, transfers included."""
    memory: tuple[float, ...]
    """Bytes that each stage holds: its states and, if a :class:`MemoryLimit` says how many, activations in flight."""
    solved: int
    """Bounds on the slowest stage for which a dynamic programme was solved."""

    @property
    def slowest(self) -> float:
        """Seconds of the stage that sets the pace."""
        return max(self.stages)


def partition(
    units: Sequence[UnitCost], stages: int, micro_batches: int = 1, *, link: Link | None = None, ties: Sequence[Tie] = (),
    crossing: Sequence[float] | None = None, memory_limit: MemoryLimit | None = None, together: bool = False, closed: Collection[int] = (),
) -> Partition:  # fmt: skip
    """Return the partition of ``units`` into ``stages`` whose step takes least time.

    Stages are contiguous, none of them empty.
    link: between processes; None: what crosses a cut costs nothing. crossing: bytes that cross a cut before each unit (those that
    follow the last one need not be given), if that is more than the output of the unit before. ties: parameters of several
    units. closed: units before which there can be no cut. together: whether the first and the last stage are on one process (a V), where
    they need not exchange gradients.
    Of cuts that are as good, the one whose stages are most alike; then the one with shorter stages first.

    Exact: no cut is better by the formula of this file. Raises PlanError for fewer units than stages, and MemoryLimitError, which
    names the least cap that would do, if no cut keeps all stages within ``memory_limit``.
    """
    count = len(units)
    if stages < 1 or micro_batches < 1:
        raise PlanError(f"stages = {stages} and micro_batches = {micro_batches} must be 1 or more")
    places = count - len({unit for unit in closed if 0 < unit < count})
    if places < stages:
        where = f", which can be cut in {places - 1} places," if places < count else ""
        raise PlanError(f"{count} units{where} are too few for {stages} stages: use {places} or less")
    if memory_limit is not None and len(memory_limit.in_flight) != stages:
        raise PlanError(
            f"memory_limit tells what {len(memory_limit.in_flight)} stages hold in flight, and there are {stages} stages"
        )
    table = _Table.of(units, link or Link(), ties, crossing, together, closed)
    allowed = [table.valid] * stages
    if memory_limit is not None:
        needs = [table.memory(memory_limit.states, flight) for flight in memory_limit.in_flight]
        allowed = [need <= memory_limit.cap for need in needs]
        least, cuts = _least_max(needs)
        if least > memory_limit.cap:
            raise MemoryLimitError(_does_not_fit(memory_limit, least, cuts, count), least, tuple(cuts))
    search = _Search(table, allowed, micro_batches)
    cuts = search.best()
    ends = [*cuts[1:], count]
    own = [float(table.waits[i, j]) for i, j in zip(cuts, ends, strict=True)]
    extra = sum(float(table.extra[i, j]) for i, j in zip(cuts, ends, strict=True))
    states, flights = (4.0, (0.0,) * stages) if memory_limit is None else (memory_limit.states, memory_limit.in_flight)
    held = [float(table.memory(states, f)[i, j]) for i, j, f in zip(cuts, ends, flights, strict=True)]
    seconds = sum(own) + extra + (micro_batches - 1) * max(own)
    return Partition(tuple(cuts), seconds, tuple(own), tuple(held), search.solved)


def _does_not_fit(memory_limit: MemoryLimit, least: float, cuts: list[int], count: int) -> str:
    sizes = [end - begin for begin, end in zip(cuts, [*cuts[1:], count], strict=True)]
    return (
        f"no cut into {len(cuts)} stages keeps each within {memory_limit.cap / 2**30:.3g} GiB: the least cap that would do is {least / 2**30:.4g} GiB "
        f"({least:.0f} bytes; stages of {', '.join(map(str, sizes))} units); take more stages, smaller or fewer micro-batches, or recompute"
    )


@dataclass(frozen=True)
class _Table:
    """Values of all ranges of units: from row i up to but without column j.

    Infinity stands for what is no range.
    """

    valid: Array
    waits: Array
    """w: seconds."""
    extra: Array
    """e: seconds."""
    parameters: Array
    saved_activation_bytes: Array
    """Bytes for a micro-batch, its input included."""

    @classmethod
    def of(
        cls, units: Sequence[UnitCost], link: Link, ties: Sequence[Tie], crossing: Sequence[float] | None, together: bool,
        closed: Collection[int],
    ) -> _Table:  # fmt: skip
        count = len(units)
        begin, end = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
        opens = np.array([at in (0, count) or at not in closed for at in range(count + 1)])
        valid = (begin < end) & opens[:, None] & opens[None, :]
        between = np.array([0.0, *(float(unit.output) for unit in units[:-1]), 0.0])
        if crossing is not None:
            between[1:count] = np.asarray(crossing, dtype=float)[1:count]
        hops = np.array([0.0, *(link.seconds(size) for size in between[1:count]), 0.0])

        def ranges(values: list[float]) -> Array:
            sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))
            return sums[None, :] - sums[:, None]

        waits = np.where(valid, ranges([unit.seconds for unit in units]) + hops[:, None] + hops[None, :], np.inf)
        parameters, extra = ranges([float(unit.parameters) for unit in units]), np.zeros_like(waits)
        for tie in ties:
            inside = ranges([float(unit in tie.units) for unit in range(count)])
            parameters -= tie.parameters * np.maximum(inside - 1, 0)
            # Charged where the first user is, unless the last one is there too.
            charged = (begin <= tie.units[0]) & (end > tie.units[0]) & (end <= tie.units[-1])
            if together and len(tie.units) == 2 and tie.units[-1] == count - 1:
                charged &= begin > 0
            extra += np.where(charged, 2 * link.seconds(tie.parameters), 0.0)
        held = ranges([float(unit.saved_activation_bytes) for unit in units]) + between[:, None]
        return cls(valid, waits, extra, parameters, held)

    def memory(self, states: float, flight: float) -> Array:
        return np.where(self.valid, self.parameters * states + self.saved_activation_bytes * flight, np.inf)


class _Search:
    """The least of sum + (m - 1) * max over all cuts."""

    def __init__(self, table: _Table, allowed: list[Array], micro_batches: int) -> None:
        self.table, self.allowed, self.others = table, allowed, micro_batches - 1
        self.cost = table.waits + table.extra
        self.solved = 0
        self.found: tuple[float, float] = (np.inf, np.inf)
        """The least seconds of a step, and the slowest stage of the cut that takes them."""

    def best(self) -> list[int]:
        least, _ = _least_max([np.where(allowed, self.table.waits, np.inf) for allowed in self.allowed])
        self.solve(least)
        sum_least, slowest = self.solve(np.inf)
        bounds = np.unique(self.table.waits[np.logical_or.reduce(self.allowed)])
        # Between two bounds sums are at least that of the upper one, and paces more than the lower one.
        open_ranges = [(least, slowest, sum_least)]
        while open_ranges:
            low, high, sum_high = open_ranges.pop()
            first, last = np.searchsorted(bounds, low, "right"), np.searchsorted(bounds, high, "left")
            if first >= last or sum_high + self.others * bounds[first] >= self.found[0] * (1 - EQUAL):
                continue
            middle = float(bounds[(first + last) // 2])
            sum_middle, slowest = self.solve(middle)  # and no less for any bound from ``slowest`` to the middle
            open_ranges += [(middle, high, sum_high), (low, slowest, sum_middle)]
        return self.evenest()

    def solve(self, bound: float) -> tuple[float, float]:
        """Return the least sum of cuts whose slowest stage takes ``bound``, and that stage's time."""
        self.solved += 1
        total, cuts = _least_sum([self.limited(allowed, bound) for allowed in self.allowed])
        slowest = max(float(self.table.waits[i, j]) for i, j in zip(cuts, [*cuts[1:], len(self.cost) - 1], strict=True))
        self.found = min(self.found, (total + self.others * slowest, slowest))
        return total, slowest

    def limited(self, allowed: Array, bound: float) -> Array:
        return np.where(allowed & (self.table.waits <= bound * (1 + EQUAL)), self.cost, np.inf)

    def evenest(self) -> list[int]:
        """Return, of the best cuts, the one whose squares of stages add up to least."""
        bound = self.found[1] if self.others else np.inf
        squares = np.where(self.table.valid, self.table.waits, 0.0) ** 2
        return _least_sum([self.limited(allowed, bound) for allowed in self.allowed], squares)[1]


def _least_sum(costs: list[Array], second: Array | None = None) -> tuple[float, list[int]]:
    """Return the least sum over stages of their costs, and the first unit of each.

    Of equal sums it is the one that is least by ``second``.
    costs: for each stage, of all ranges.
    """
    sums = costs[0][0]
    others = second[0] if second is not None else None
    choices = []
    for cost in costs[1:]:
        every = sums[:, None] + cost
        least = every.min(axis=0)
        if second is None or others is None:
            choice = every.argmin(axis=0)
        else:
            kept = np.where(every <= least * (1 + EQUAL), others[:, None] + second, np.inf)
            choice = _first_least(kept)
            others = kept[choice, np.arange(len(choice))]
        sums = least
        choices.append(choice)
    return float(sums[-1]), _cuts(choices)


def _first_least(values: Array) -> Array:
    """Return for each column the first row whose value is the least, up to rounding."""
    first: Array = (values <= values.min(axis=0) * (1 + EQUAL)).argmax(axis=0)
    return first


def _least_max(costs: list[Array]) -> tuple[float, list[int]]:
    """Return the least maximum over stages of their costs, and the first unit of each."""
    slowest, choices = costs[0][0], []
    for cost in costs[1:]:
        every = np.maximum(slowest[:, None], cost)
        choices.append(every.argmin(axis=0))
        slowest = every.min(axis=0)
    return float(slowest[-1]), _cuts(choices)


def _cuts(choices: list[Array]) -> list[int]:
    cuts: list[int] = []
    end = len(choices[0]) - 1 if choices else 0
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.insert(0, end)
    return [0, *cuts]


CutCost = Callable[[tuple[int, ...]], tuple[float, ...]]
"""How bad a cut is: compared from the left, less is better."""


def refine(
    cuts: Sequence[int], count: int, judge: CutCost, most: int = 2000, closed: Collection[int] = ()
) -> tuple[int, ...]:
    """Refine cuts by hill climbing on ``judge``, moving one, two, or a row of boundaries.

    Hill climbing from ``cuts`` (the first unit of each stage) over ``count`` units, for schedules with several stages on a process,
    for which no formula holds: ``judge`` may simulate them. It is asked ``most`` times at most. closed: units before which there can be no cut.
    """
    best = tuple(cuts)
    value, evaluated = judge(best), {best}
    improved = True
    while improved:
        improved = False
        for change in _moves(best, count):
            if change in evaluated or len(evaluated) >= most or not set(change[1:]).isdisjoint(closed):
                continue
            evaluated.add(change)
            tried = judge(change)
            if tried < value:
                best, value, improved = change, tried, True
                break
    return best


def _moves(cuts: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts one step away: one boundary, a row of neighbours, or any two.

    Boundaries move by one unit; if a row moves, whole stages do.
    """
    places = range(1, len(cuts))
    rows = [dict.fromkeys(range(a, b), 1) for a in places for b in range(a + 1, len(cuts) + 1)]
    pairs = [{a: 1, b: sign} for a, b in itertools.combinations(places, 2) for sign in (1, -1)]
    for shifts in sorted([*rows, *pairs], key=len):
        for sign in (1, -1):
            moved = tuple(cut + sign * shifts.get(place, 0) for place, cut in enumerate(cuts))
            if all(a < b for a, b in zip(moved, (*moved[1:], count), strict=True)):
                yield moved
