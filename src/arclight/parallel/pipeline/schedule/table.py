"""Look up pipeline schedules by name or file.

The strategies, ``runtime``, ``cost`` and ``planning`` ask `schedule_kind`, `order_of` and `check_pipeline`. Names are values of
`Plan.schedule`: they stay. A new schedule is an entry of `SCHEDULES`.

Idle time of a process of p in a step, and how many of m micro-batches it holds at most. F, I and W of its stages take one unit each,
v is the number of its stages, and a micro-batch counts until its backward (W) is over:

    schedule                  idle                 held             stages of a process
    GPipe                     3 (p - 1)            m                1
    1F1B                      3 (p - 1)            p                1
    LoopedBFS                 3 (p - 1) / v        m                v = 2 or more
    Interleaved1F1B           3 (p - 1) / v        p + (p - 1) / v  v = 2 or more
    ZB-H1                     p - 1                p                1
    ZB-H2                     p - 1, or 0          2 p - 1          1
    InterleavedZeroBubble     (p - 1) / v          p                v = 2 or more
    ZBVZeroBubble, V-ZB       (p - 1) / 2, or 0    p                2, in a V
    DualPipeV                 (p - 1) / 2          p + 1/2          2, in a V
    V-Half                    1.5 p or less        (p + 2) // 2     2, in a V
    V-Min                     2 p or less          (p + 4) // 3     2, in a V

The second number is for updates that do not wait for all processes: then each begins its next step while others still end theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from arclight.parallel.pipeline.schedule.actions import Order
from arclight.parallel.pipeline.schedule.order_generators import (
    dual_pipe_v,
    gpipe,
    looped_bfs,
    one_forward_one_backward,
    per_round,
    v_half,
    v_min,
    zero_bubble,
    zero_bubble_ahead,
    zero_bubble_v,
)
from arclight.parallel.pipeline.schedule.orders import first_of, load_order, peak_in_flight, shape_of, splits_backward
from arclight.parallel.plan import Plan, PlanError

NOT_COMPILED = "computes gradients of weights by themselves, which compiled blocks cannot"
"""Why a schedule that splits the backward is refused under a compiler."""


@dataclass(frozen=True)
class ScheduleKind:
    """Schedule: generator of orders, placement of stages, and valid numbers of micro-batches."""

    name: str
    """Name for :func:`order_of`: one of :data:`SCHEDULES` (with ``:4`` for another number of stages), or a file."""
    generate: Callable[[int, int, int], Order] | None
    """Give the order of (processes, micro-batches, stages of each process); None for a file, which has one."""
    stages_per_process: int = 1
    any_number: bool = False
    """True if a process may have another number of stages."""
    v_shaped: bool = False
    """True if a process has stages i and n - 1 - i; else it has i and i + processes."""
    splits_backward: bool = False
    """True if gradients of weights are computed apart from those of activations, which compiled code cannot do."""
    fewest: Callable[[int], int] = lambda processes: 1
    """Return the least number of micro-batches, of a number of processes."""
    whole_rounds: bool = False
    """True if micro-batches must divide into rounds of equal length, each with at least as many as there are processes."""
    only: tuple[int, int] | None = None
    """The only numbers of processes and of micro-batches that it takes, of a file; None: others too."""
    held: Callable[[int, int, int, int], int] | None = None
    """Give the most passes (micro-batch, stage) whose activations a process holds, of (processes, stages of each, micro-batches, process);
    None if they are counted in the order."""
    idle_per_hop: Callable[[float], float] | None = None
    """Give idle forward times of a process for each other process and each of its stages, of backward over forward; None: simulated."""
    receives_when_due: bool = False
    """True if torch's own schedule posts receives only at the action that needs them, so that no transfer starts before."""
    trimmed_from: int | None = None
    """Micro-batches of the order whose first ones are run, if a batch has fewer; None: orders are made for the batch's own number."""

    def fits(self, micro_batches: int, processes: int) -> bool:
        """Return True for numbers that the schedule takes."""
        if self.only is not None:
            return self.only == (processes, micro_batches)
        if micro_batches < self.fewest(processes):
            return False
        return not self.whole_rounds or micro_batches % max(1, micro_batches // processes) == 0

    def max_in_flight(self, processes: int, process: int, micro_batches: int) -> int:
        """Return the most passes (micro-batch, stage) whose activations a process holds at once.

        A schedule that splits the backward holds activations until the gradients of weights are computed.
        """
        own = self.stages_per_process
        if self.held is not None:
            return min(own * micro_batches, self.held(processes, own, micro_batches, process))
        number = micro_batches if self.only is not None else min(micro_batches, 4 * processes)
        return _counted(self.name, processes, number)[process]

    def order(self, processes: int, micro_batches: int) -> Order:
        """Return the actions of each process.

        Raises PlanError as :func:`order_of`.
        """
        return first_of(order_of(self.name, processes, self.trimmed_from or micro_batches), micro_batches)


@lru_cache(maxsize=256)
def _counted(name: str, processes: int, micro_batches: int) -> list[int]:
    return peak_in_flight(order_of(name, processes, micro_batches))


def _forward_and_backward(backward: float) -> float:
    """F + B (Narayanan et al. 2021)."""
    return 1 + backward


def _forward_alone(backward: float) -> float:
    """Compute F + B - 2 W, W being half of backward (Qi et al. 2023).

    For ZB-H2 too, as here updates wait for all processes.
    """
    return 1.0


def _interleaved(p: int, v: int, m: int, s: int) -> int:
    return (v - 1) * per_round(p, m) + 2 * (p - 1 - s) + 1


def _v_shaped(p: int, v: int, m: int, s: int) -> int:
    return min(2 * p, m + 1 + s)


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            "GPipe", gpipe, held=lambda p, v, m, s: m, idle_per_hop=_forward_and_backward, receives_when_due=True,
        ),
        ScheduleKind(
            "1F1B", one_forward_one_backward, fewest=lambda processes: processes,
            held=lambda p, v, m, s: p - s, idle_per_hop=_forward_and_backward, receives_when_due=True,
        ),
        ScheduleKind(
            "LoopedBFS", looped_bfs, 2, any_number=True, held=lambda p, v, m, s: v * m, idle_per_hop=_forward_and_backward,
        ),
        ScheduleKind(
            "Interleaved1F1B", one_forward_one_backward, 2, any_number=True, whole_rounds=True,
            held=_interleaved, idle_per_hop=_forward_and_backward,
        ),
        ScheduleKind(
            "InterleavedZeroBubble", zero_bubble, 2, any_number=True, splits_backward=True, whole_rounds=True,
            held=lambda p, v, m, s: (v - 1) * per_round(p, m) + p, idle_per_hop=_forward_alone,
        ),
        ScheduleKind(
            "ZBVZeroBubble", zero_bubble_v, 2, v_shaped=True, splits_backward=True,
            held=_v_shaped, idle_per_hop=_forward_alone,
        ),
        ScheduleKind(
            "DualPipeV", dual_pipe_v, 2, v_shaped=True, splits_backward=True, fewest=lambda processes: 2 * processes,
            held=lambda p, v, m, s: 2 * p + 1, idle_per_hop=_forward_alone,
        ),
        ScheduleKind(
            "ZB-H1", zero_bubble, splits_backward=True, held=lambda p, v, m, s: p, idle_per_hop=_forward_alone,
        ),
        ScheduleKind(
            "ZB-H2", zero_bubble_ahead, splits_backward=True,
            held=lambda p, v, m, s: 2 * p - 1, idle_per_hop=_forward_alone,
        ),
        ScheduleKind("V-Half", v_half, 2, v_shaped=True, splits_backward=True),
        ScheduleKind("V-Min", v_min, 2, v_shaped=True, splits_backward=True),
        ScheduleKind(
            "V-ZB", zero_bubble_v, 2, v_shaped=True, splits_backward=True, held=_v_shaped, idle_per_hop=_forward_alone,
        ),
    )
}  # fmt: skip
"""Schedules by name. V-ZB, the third of the family of V-Half and V-Min, is what ZB-V already does: no bubble, held like 1F1B."""


def is_file(schedule: str) -> bool:
    """Return True for a schedule that is given as a file of actions."""
    return schedule.lower().endswith(".csv")


def parse_name(schedule: str) -> tuple[str, int]:
    """Split a schedule into its canonical name, and the stages of each process.

    Raises PlanError for unknown names.
    """
    text, _, number = schedule.partition(":")
    found = next((name for name in SCHEDULES if name.lower() == text.strip().lower()), None)
    if found is None:
        raise PlanError(f"there is no pipeline schedule {schedule!r}; choose {', '.join(SCHEDULES)}, or a CSV file")
    kind = SCHEDULES[found]
    if not number:
        return found, kind.stages_per_process
    if not number.isdecimal() or int(number) < 1 or not (kind.any_number or int(number) == kind.stages_per_process):
        several = ", ".join(name for name, one in SCHEDULES.items() if one.any_number)
        raise PlanError(f"{schedule!r}: a number of stages of each process can follow {several}, as LoopedBFS:4")
    return found, int(number)


def schedule_kind(schedule: str) -> ScheduleKind:
    """Find a schedule by name, in any case of letters, or read that of a CSV file.

    Raises PlanError for a name that there is not, and for a file that cannot be run.
    """
    if is_file(schedule):
        try:
            changed = Path(schedule).stat().st_mtime_ns
        except OSError as error:
            raise PlanError(f"the schedule {schedule} cannot be read: {error.strerror}") from error
        return _file_kind(schedule, changed)
    known, own = parse_name(schedule)
    kind = SCHEDULES[known]
    return kind if own == kind.stages_per_process else replace(kind, name=f"{known}:{own}", stages_per_process=own)


@lru_cache(maxsize=32)
def _file_kind(path: str, changed: int) -> ScheduleKind:
    order = load_order(path)
    stages, micro_batches, v_shaped = shape_of(order)
    return ScheduleKind(
        path, None, stages // len(order), v_shaped=v_shaped, splits_backward=splits_backward(order),
        only=(len(order), micro_batches),
    )  # fmt: skip


def order_of(schedule: str, ranks: int, micro_batches: int, stages_per_process: int | None = None) -> Order:
    """Return the actions of each of ``ranks`` processes by ``schedule``.

    It is one of :data:`SCHEDULES` (in any case of letters), or a CSV file. Names may end in the number of stages on
    each process, as ``Interleaved1F1B:4``. A file has a line for each process, of actions as ``2F0`` in torch's format
    "compute_only", and is checked by `orders.check_order`. Raises PlanError for what there is not, and for numbers that
    the schedule cannot take.
    """
    if is_file(schedule):
        order = load_order(schedule)
        found = len(order), 1 + max(action.micro_batch for actions in order for action in actions)
        if found != (ranks, micro_batches):
            raise PlanError(
                f"{schedule} is for {found[0]} processes and {found[1]} micro-batches, not for {ranks} and {micro_batches}"
            )
        return order
    name, number = parse_name(schedule)
    return _generated(name, ranks, micro_batches, stages_per_process or number)


@lru_cache(maxsize=256)
def _generated(name: str, ranks: int, micro_batches: int, own: int) -> Order:
    kind = SCHEDULES[name]
    if ranks < 1 or micro_batches < 1:
        raise PlanError(f"{name} needs processes and micro-batches: there are {ranks} and {micro_batches}")
    if own != kind.stages_per_process and not kind.any_number:
        raise PlanError(f"{name} has {kind.stages_per_process} stages on each process, and no other number: {own}")
    if kind.whole_rounds and micro_batches % per_round(ranks, micro_batches):
        raise PlanError(
            f"{name} over {ranks} processes takes micro-batches in rounds of equal length: {micro_batches} leave some over"
        )
    assert kind.generate is not None
    return kind.generate(ranks, micro_batches, own)


def that_fits(kind: ScheduleKind, micro_batches: int, processes: int, backward: bool = True) -> ScheduleKind:
    """Return ``kind``, or a schedule for the same stages that takes this many micro-batches.

    Stages are on the same processes. That is ``kind`` for the next larger number that it takes, without the surplus
    micro-batches: peak memory does not grow. A simple one if there is no larger number (of a file), and for forwards
    only, for which all orders are as good.
    """
    if backward and kind.fits(micro_batches, processes):
        return kind
    larger = range(micro_batches, 2 * (micro_batches + processes) + 1)
    near = next((n for n in (*larger, *(kind.only or ())[1:]) if n >= micro_batches and kind.fits(n, processes)), None)
    if backward and near is not None:
        return replace(kind, trimmed_from=near, fewest=_one, whole_rounds=False, only=None)
    if kind.stages_per_process == 1:
        return SCHEDULES["GPipe"]
    return SCHEDULES["ZBVZeroBubble" if kind.v_shaped else "LoopedBFS"]


def _one(processes: int) -> int:
    return 1


def check_pipeline(plan: Plan) -> None:
    """Raise PlanError, naming the fix, for a plan whose schedule cannot be run."""
    kind, number = schedule_kind(plan.schedule), plan.pieces
    if kind.only is not None and not kind.fits(number, plan.pp):
        raise PlanError(
            f"{plan.schedule} is for {kind.only[0]} processes and {kind.only[1]} micro-batches, not for {plan.pp} and {number}: set "
            f"pp = {kind.only[0]} and micro_batches = {kind.only[1]}, or schedule to one of {', '.join(SCHEDULES)}"
        )
    if not kind.fits(number, plan.pp):
        near = next(
            n for n in range(max(number, kind.fewest(plan.pp)), 10 * (number + plan.pp)) if kind.fits(n, plan.pp)
        )
        raise PlanError(
            f"{plan.schedule} over pp = {plan.pp} cannot take {number} micro-batches: set micro_batches = {near}, or schedule = "
            f"{'GPipe' if kind.stages_per_process == 1 else 'LoopedBFS'}"
        )
    if kind.splits_backward and plan.compile != "none":
        whole = [name for name, other in SCHEDULES.items() if not other.splits_backward]
        raise PlanError(f"{plan.schedule} {NOT_COMPILED}: set compile = none, or schedule to one of {', '.join(whole)}")
