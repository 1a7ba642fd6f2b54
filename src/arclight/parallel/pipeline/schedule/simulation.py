"""Simulate a step of a schedule: start and end of each action, idle time, memory held.

`candidates`, `forecast`, `recording` and `planning.estimates` call `simulate`, `planning.timing` calls `idle_seconds`. In: an order of
actions and their costs; out: a `Prediction`. The same arguments give the same result: tests compare it with closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar

from arclight.parallel.pipeline.schedule.actions import Action, Order
from arclight.parallel.pipeline.schedule.orders import check_order, needs, shape_of
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace
from arclight.parallel.pipeline.schedule.table import SCHEDULES, is_file, order_of, parse_name
from arclight.parallel.pipeline.unit_costs import Link, UnitCost
from arclight.parallel.plan import PlanError

T = TypeVar("T")
Receives = Literal["early", "due"]
"""When a process posts its receives: ahead of need ("early": torch's runtime of actions), or at the action that needs them ("due": torch's
GPipe and 1F1B), so that no transfer starts before."""


AT_ONCE = Link()
"""Link over which messages take no time."""


@dataclass(frozen=True)
class Prediction(Trace):
    """A step as :func:`simulate` predicts it."""

    ends: tuple[float, ...] = ()
    """Times at which each process has reduced its gradients and its optimizer is done, in seconds since the step began."""

    @property
    def step_seconds(self) -> float:
        """Measure from the beginning to the end of the last process's optimizer."""
        return max(self.ends)


def simulate(
    schedule: str | Order,
    costs: Sequence[UnitCost],
    ranks: int | None = None,
    micro_batches: int | None = None,
    *,
    link: Link | Sequence[Link] = AT_ONCE,
    overlap: bool = True,
    receives: Receives | None = None,
    whole_first: bool = True,
    freed_by_inputs: float | Sequence[float] = 0.0,
    shares: Sequence[float] | None = None,
    reduction: float | Sequence[float] = 0.0,
    optimizer: float | Sequence[float] = 0.0,
    synchronous: bool = True,
) -> Prediction:
    """Predict a step of ``schedule``.

    Each process does its actions in their order, each as soon as what it needs is there. F, I and W of a stage take what
    ``costs`` (one for each stage, of one micro-batch) say; B takes I + W. What a stage gives to one of another process
    (``output`` bytes, as much for the gradient on the way back) is sent as one message: latency + bytes / bandwidth, one after
    the other between the same two processes in the same direction.

    Args:
        schedule: a name or a file (see `table.order_of`), or an order.
        costs: of each stage; schedules that take any number of stages on a process take as many as there are costs for.
        ranks: processes, for a name or a file.
        micro_batches: their number, for a name or a file.
        link: between all processes, or one for each boundary between stages (from stage n to n + 1 and back).
        overlap: whether sending leaves the sender free to compute; otherwise it waits until all has arrived.
        receives: see :data:`Receives`; None for what is done for a schedule of this name.
        whole_first: whether the first stage leaves all of a split backward to W, as it does here, since nobody waits for the
            gradient of its input. False for figures as in papers.
        freed_by_inputs: of what a stage holds for backward, the part that the backward of the inputs (I) frees, for each
            stage or for all; the rest is freed by W, and B frees all. PyTorch frees none of it, since the graph that W goes
            through leads to all of it; less than none if the gradients that are kept for W are counted. Papers say a half.
        shares: sizes of the micro-batches, where 1 is the one that costs are of. None: all alike.
        reduction: seconds for which a process exchanges gradients with others of its stages after its last action, each or all.
        optimizer: seconds of the optimizer's step, each or all.
        synchronous: whether no optimizer starts before all processes have their gradients (norms are clipped by it).

    Raises PlanError for an order that cannot be run, and for costs of another number of stages.
    """
    name, order = _order(schedule, len(costs), ranks, micro_batches)
    stages, number, _ = shape_of(order)
    if len(costs) != stages:
        raise PlanError(f"{name} has {stages} stages: {len(costs)} costs were given")
    if shares is not None and len(shares) != number:
        raise PlanError(f"{name} has {number} micro-batches: {len(shares)} shares were given")
    if receives is None:
        receives = "due" if name in SCHEDULES and SCHEDULES[name].receives_when_due else "early"
    freed = list(_each(freed_by_inputs, stages))
    if whole_first:
        costs = [replace(costs[0], inputs=0.0, weights=costs[0].backward), *costs[1:]]
        freed[0] = 0.0
    run = _Run(order, costs, _each(link, max(1, stages - 1)), overlap, receives == "early", shares or [1.0] * number)
    run.all()
    spans = _with_memory(run, costs, freed)
    ends = _ends(run.clocks, _each(reduction, len(order)), _each(optimizer, len(order)), synchronous)
    return Prediction(name, len(order), stages, number, spans, run.waits, ends)


def _order(
    schedule: str | Order, stages: int, ranks: int | None, micro_batches: int | None
) -> tuple[str, Order]:  # fmt: skip
    """Return a schedule's name, as it is written here, and its order."""
    if not isinstance(schedule, str):
        return "order", schedule
    if ranks is None or micro_batches is None:
        raise PlanError(f"to simulate {schedule}, say for how many processes (ranks) and micro_batches")
    if is_file(schedule):
        return schedule, order_of(schedule, ranks, micro_batches)
    name, own = parse_name(schedule)
    if SCHEDULES[name].any_number and stages % ranks == 0:
        own = stages // ranks
    full = name if own == SCHEDULES[name].stages_per_process else f"{name}:{own}"
    return full, order_of(name, ranks, micro_batches, own)


def _each(value: T | Sequence[T], number: int) -> Sequence[T]:
    """Return ``value`` for each of ``number``, or the values that were given for them."""
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise PlanError(f"{len(value)} values were given for {number}")
    return value


def _ends(
    clocks: Sequence[float], reduction: Sequence[float], optimizer: Sequence[float], synchronous: bool
) -> tuple[float, ...]:  # fmt: skip
    reduced = [clock + seconds for clock, seconds in zip(clocks, reduction, strict=True)]
    last = max(reduced)
    return tuple((last if synchronous else own) + step for own, step in zip(reduced, optimizer, strict=True))


@dataclass(frozen=True)
class _Turn:
    """An action as the simulator goes through it."""

    rank: int
    action: Action
    before: tuple[tuple[int, bool], ...]
    """Numbers of the turns that it needs, each with whether another process has it."""
    to: int | None
    """The other process that needs what it makes, if any."""
    boundary: int
    """The stage before what it sends crosses, there or back."""


@lru_cache(maxsize=64)
def _turns(order: Order) -> tuple[_Turn, ...]:
    """Sort all actions after what they need, and by their order on each process.

    Raises PlanError if there is no such order.
    """
    stages = shape_of(order)[0]
    owner = {action.stage: rank for rank, one in enumerate(order) for action in one}
    numbers: dict[Action, int] = {}
    found: list[_Turn] = []
    at, moved = [0] * len(order), True
    while moved:
        moved = False
        for rank, one in enumerate(order):
            while at[rank] < len(one):
                action = one[at[rank]]
                before = [next((a for a in choice if a in numbers), None) for choice in needs(action, stages)]
                if None in before:
                    break
                needed = tuple((numbers[a], owner[a.stage] != rank) for a in before if a is not None)
                next_stage = {"F": action.stage + 1, "W": -1}.get(action.kind, action.stage - 1)
                to, boundary = owner.get(next_stage), min(action.stage, next_stage)
                numbers[action] = len(found)
                found.append(_Turn(rank, action, needed, to if to != rank else None, boundary))
                at[rank] += 1
                moved = True
    check_order(order)
    return tuple(found)


class _Run:
    """Clocks of processes and links, moved on action by action."""

    def __init__(
        self, order: Order, costs: Sequence[UnitCost], links: Sequence[Link], overlap: bool, early: bool,
        shares: Sequence[float],
    ) -> None:  # fmt: skip
        self.order, self.costs, self.links, self.shares = order, costs, links, shares
        self.overlap, self.early = overlap, early or not overlap
        self.clocks = [0.0] * len(order)
        self.busy: dict[tuple[int, int], float] = {}
        """Until when messages from one process to another are on their way."""
        self.times: list[tuple[int, Action, float, float]] = []
        self.waits: dict[Action, float] = {}

    def all(self) -> None:
        turns = _turns(self.order)
        took = [{"F": c.forward, "B": c.backward, "I": c.inputs, "W": c.weights} for c in self.costs]
        ends: list[float] = []
        arrived: list[float] = []
        for turn in turns:
            action, rank = turn.action, turn.rank
            start = free = self.clocks[rank]
            for number, remote in turn.before:
                if not remote:
                    ready = ends[number]
                elif self.early:
                    ready = arrived[number]
                else:
                    ready = self._send(turns[number], max(ends[number], free))
                start = max(start, ready)
            end = start + took[action.stage][action.kind] * self.shares[action.micro_batch]
            self.times.append((rank, action, start, end))
            if start > free:
                self.waits[action] = start - free
            ends.append(end)
            arrived.append(self._send(turn, end) if self.early and turn.to is not None else end)
            self.clocks[rank] = end if self.overlap else arrived[-1]

    def _send(self, turn: _Turn, at: float) -> float:
        """Send a message that could leave at ``at``; gives when it arrives."""
        assert turn.to is not None
        link, size = self.links[turn.boundary], self.costs[turn.boundary].output * self.shares[turn.action.micro_batch]
        begin = max(at, self.busy.get((turn.rank, turn.to), 0.0))
        self.busy[turn.rank, turn.to] = begin + size / link.bandwidth
        return begin + link.seconds(size)


def _with_memory(run: _Run, costs: Sequence[UnitCost], freed: Sequence[float]) -> tuple[Span, ...]:
    """Return the spans with the bytes that each process holds after them."""
    live = [0] * len(run.order)
    spans = []
    for rank, action, start, end in sorted(run.times, key=lambda one: (one[2], one[3])):
        held = round(costs[action.stage].saved_activation_bytes * run.shares[action.micro_batch])
        by_inputs = round(held * freed[action.stage])
        live[rank] += {"F": held, "B": -held, "I": -by_inputs, "W": by_inputs - held}[action.kind]
        spans.append(Span(rank, action, start, end, live[rank]))
    return tuple(spans)


def idle_seconds(schedule: str, ranks: int, micro_batches: int, forward: float, inputs: float, weights: float) -> float:
    """Return the idle seconds of a process in a step of equal stages, without communication.

    All stages split backward alike.
    forward, inputs, weights: seconds of a process's whole share of F, I, W.
    """
    order = order_of(schedule, ranks, micro_batches)
    stages, number, _ = shape_of(order)
    part = ranks / stages
    trace = simulate(order, [UnitCost(forward * part, inputs * part, weights * part)] * stages, whole_first=False)
    return trace.seconds - number * (forward + inputs + weights)
