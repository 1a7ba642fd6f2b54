"""Hold one step of a pipeline, predicted or measured: actions, idle time, memory.

An `Action` is one stage's forward or backward of one micro-batch; a `Trace` has the spans of all of them. `simulation` and
`runtime.recording` make it; ``view``, ``cost``, ``planning`` and ``arclight plan`` read its idle time and memory. A predicted step must keep the
fields of a measured one, so that they can be compared (`simulation.Prediction` adds the ends of ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from statistics import fmean

from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.orders import needs
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class Span:
    """An action as it ran, predicted or measured. Seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float
    live: int = 0
    """Bytes of activations that the process holds when the action ends."""


@dataclass(frozen=True)
class Trace:
    """One step of a pipeline, predicted or measured."""

    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    spans: tuple[Span, ...]
    waits: dict[Action, float] = field(default_factory=dict)
    """Seconds that a process was held up before an action, by what had not arrived."""

    def __str__(self) -> str:
        """Return a table: for each process how busy it was, and why it was not."""
        return describe(self)

    @property
    def seconds(self) -> float:
        """Measure from the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def of(self, rank: int) -> list[Span]:
        """List the actions of one process, by time."""
        return sorted((span for span in self.spans if span.rank == rank), key=lambda span: span.start)

    @classmethod
    def merge(cls, parts: Iterable[Trace]) -> Trace:
        """Return one trace of those that the processes of one pipeline took of themselves."""
        first, *rest = parts
        spans = (*first.spans, *(span for part in rest for span in part.spans))
        waits = first.waits | {action: wait for part in rest for action, wait in part.waits.items()}
        return cls(first.schedule, first.ranks, first.stages, first.micro_batches, spans, waits)


@dataclass(frozen=True)
class Idle:
    """Idle seconds of one process in one step, by cause.

    Waits for other processes between two actions are divided by replaying the same order: what vanishes if transfers are
    free is communication; of the rest, what remains if all stages are alike as well is the schedule's, and the
    difference is imbalance.
    """

    warm_up: float
    """Before its first action: the pipeline fills."""
    schedule: float
    """Waiting that the order itself imposes."""
    imbalance: float
    """Waiting because stages take different times."""
    communication: float
    """Waiting because what was computed arrives later."""
    overhead: float
    """Seconds between actions that wait for no other process."""
    cool_down: float
    """After its last action, until the step is over: the pipeline drains."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return float(sum(astuple(self)))


CAUSES = tuple(Idle.__dataclass_fields__)
"""Names of the fields of :class:`Idle`."""


def source(action: Action, trace: Trace, spans: dict[Action, Span]) -> Span | None:
    """Return the span of the action that makes the input of ``action``; None without one.

    ``spans``: those of ``trace`` by action. None for forwards of the first stage, whose input is there from the start.
    """
    choices = [*needs(action, trace.stages)]
    return next((spans[made] for made in choices[-1] if made in spans), None) if choices else None


def by_process(trace: Trace) -> list[list[Span]]:
    """List what each process did, by time."""
    lanes: list[list[Span]] = [[] for _ in range(trace.ranks)]
    for span in sorted(trace.spans, key=lambda span: span.start):
        lanes[span.rank].append(span)
    return lanes


def busy(trace: Trace) -> list[float]:
    """Return the seconds that each process worked."""
    begin = min(span.start for span in trace.spans)
    return [sum(end - start for _, start, end, _ in _worked(lane, begin)) for lane in by_process(trace)]


def bubble(trace: Trace) -> float:
    """Return the idle share of all processes' time, in [0, 1]."""
    return 1 - sum(busy(trace)) / (trace.ranks * trace.seconds)


def peak_bytes(trace: Trace) -> list[int]:
    """Return the most bytes of activations that each process held at the end of an action."""
    peaks = [0] * trace.ranks
    for span in trace.spans:
        peaks[span.rank] = max(peaks[span.rank], span.live)
    return peaks


def idle(trace: Trace) -> list[Idle]:
    """Return the idle seconds of each process by cause.

    With :func:`busy` they add up to the seconds of the step. Raises PlanError for a trace in which a process waits for
    what none of them does.
    """
    spans = {span.action: span for span in trace.spans}
    begin = min(span.start for span in trace.spans)
    before = {span.action: source(span.action, trace, spans) for span in trace.spans}
    took, gaps, ends = dict[Action, float](), dict[Action, float](), [begin] * trace.ranks
    totals = [[0.0, 0.0, 0.0] for _ in range(trace.ranks)]  # warm-up, waiting, overhead
    lanes = by_process(trace)
    for rank, lane in enumerate(lanes):
        for number, (last, start, end, span) in enumerate(_worked(lane, begin)):
            made = before[span.action]
            local = number > 0 and (made is None or made.rank == rank)
            totals[rank][0 if number == 0 else 2 if local else 1] += start - last
            took[span.action], gaps[span.action] = end - start, start - last if local else 0.0
            ends[rank] = end
    kinds = {span.action.kind for span in trace.spans}
    mean = {kind: fmean(seconds for action, seconds in took.items() if action.kind == kind) for kind in kinds}
    alike = _waits(lanes, before, {action: mean[action.kind] for action in took})
    as_they_are = _waits(lanes, before, {action: seconds + gaps[action] for action, seconds in took.items()})
    found, finish = [], begin + trace.seconds
    for rank, (warm_up, waiting, overhead) in enumerate(totals):
        at_once = min(waiting, as_they_are[rank])
        schedule = min(at_once, alike[rank])
        found.append(Idle(warm_up, schedule, at_once - schedule, waiting - at_once, overhead, finish - ends[rank]))
    return found


def _worked(lane: list[Span], begin: float) -> Iterator[tuple[float, float, float, Span]]:
    """Yield each action of a process with when it was last at work, began and was done."""
    last = begin
    for span in lane:
        start = max(last, span.start)
        yield last, start, max(start, span.end), span
        last = max(start, span.end)


def _waits(lanes: list[list[Span]], before: dict[Action, Span | None], took: dict[Action, float]) -> list[float]:
    """Sum each process's waits for others if actions take ``took`` and all else takes no time."""
    orders, done = [[span.action for span in lane] for lane in lanes], dict[Action, float]()
    clocks, positions, waits = [0.0] * len(lanes), [0] * len(lanes), [0.0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                made = before[action]
                ready = done.get(made.action) if made is not None else 0.0
                if ready is None:
                    break
                if positions[rank]:
                    waits[rank] += max(0.0, ready - clocks[rank])
                clocks[rank] = done[action] = max(ready, clocks[rank]) + took[action]
                positions[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if positions[rank] < len(order):
            raise PlanError(f"in this trace process {rank} does {order[positions[rank]]} before what it needs is done")
    return waits


def describe(trace: Trace, predicted: Trace | None = None) -> str:
    """Format a step as a table for terminals: busy and idle time, and memory, by process."""
    head = (
        f"{trace.schedule}: {trace.ranks} processes, {trace.stages} stages, {trace.micro_batches} micro-batches; "
        f"step {1000 * trace.seconds:.1f} ms, bubble {bubble(trace):.1%}"
    )
    if predicted is not None:
        head += f" (predicted {1000 * predicted.seconds:.1f} ms, {bubble(predicted):.1%})"
    names = ["process", "stages", "busy", *(cause.replace("_", "-") for cause in CAUSES), "activations"]
    rows, causes, worked, peaks = [names], idle(trace), busy(trace), peak_bytes(trace)
    for rank, lane in enumerate(by_process(trace)):
        stages = sorted({span.action.stage for span in lane})
        shares = [worked[rank], *astuple(causes[rank])]
        held = f"{peaks[rank] / 2**20:.1f} MiB" if peaks[rank] else "-"
        rows.append([str(rank), ",".join(map(str, stages)), *(f"{x / trace.seconds:.1%}" for x in shares), held])
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    return "\n".join([head, *("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)])
