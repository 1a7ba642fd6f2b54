"""Record pipeline steps as they run: actions of every rank on one clock, and activations.

`record` is public as ``pipeline.record``; `stage` and `torch_pipelining` report each action to it while it is on. ``view`` draws a
`Recording`, and the callback `PipelineTimeline` makes one in a fit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace, by_process, describe, source
from arclight.parallel.pipeline.unit_costs import UnitCost
from arclight.parallel.plan import PlanError

_ROUND_TRIPS = 64
"""Round trips by which two clocks are compared; the fastest is the most exact."""


@dataclass(eq=False)
class Recording:
    """Steps of one pipeline; filled on all of its processes when :func:`record` ends."""

    skip: int = 0
    steps: int | None = None
    activations: bool = False
    traces: list[Trace] = field(default_factory=list)
    """The recorded steps, in order."""
    first: bool = True
    """Whether this process is the first of all, which writes files."""
    _taken: list[tuple[Trace, float]] = field(default_factory=list)
    _seen: int = 0
    _group: Any = None
    _device: Any = None

    @property
    def typical(self) -> Trace:
        """Training step of median length.

        If there is none, it is the evaluation step of median length. Raises PlanError for none.
        """
        if not self.traces:
            raise PlanError("no step was recorded: run a pipeline's steps within `with pipeline.record() as run:`")
        trained = [trace for trace in self.traces if any(span.action.kind != "F" for span in trace.spans)]
        ordered = sorted(trained or self.traces, key=lambda trace: trace.seconds)
        return ordered[(len(ordered) - 1) // 2]

    def __str__(self) -> str:
        return describe(self.typical) if self.traces else "no step of a pipeline is recorded yet"

    @property
    def simulated(self) -> Trace:
        """The :attr:`typical` step simulated with its stages' mean times, and instant messages.

        Each action takes what its kind takes on its stage on average: all that it lacks is noise, and time on the way.
        """
        typical = self.typical
        order = tuple(tuple(span.action for span in lane) for lane in by_process(typical))
        step = simulate(order, stage_costs(typical), freed_by_inputs=0.0, whole_first=False)
        return replace(step, schedule=typical.schedule)

    def start(self) -> None:
        """Start to record, on all processes of the pipeline.

        Raises PlanError if another recording is under way.
        """
        if _current.get() not in (None, self):
            raise PlanError("steps are being recorded already: one `with pipeline.record()` cannot lie within another")
        _current.set(self)

    def stop(self) -> None:
        """Record no more. :meth:`gather` puts together what there is."""
        _current.set(None)

    def gather(self) -> None:
        """Gather the records of all processes of the pipeline, each on its own clock.

        All of them call it.
        """
        if not self._taken:
            return
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        parts: list[Any] = [self._taken]
        if self._group is not None:
            offset = _clock_offset(self._group, self._device)
            parts *= dist.get_world_size(self._group)
            own = [(trace, begin + offset) for trace, begin in self._taken]
            dist.all_gather_object(parts, own, group=self._group)
        self.traces = [_merge_traces(step) for step in zip(*parts, strict=True)]
        self._taken = []

    @property
    def complete(self) -> bool:
        """Return True once it has as many steps as were asked for."""
        return self.steps is not None and len(self._taken) + len(self.traces) >= self.steps

    def _records_next(self) -> bool:
        self._seen += 1
        return self._seen > self.skip and not self.complete


_current: ContextVar[Recording | None] = ContextVar("recording of a pipeline", default=None)


@contextmanager
def record(skip: int = 0, steps: int | None = None, *, activations: bool = False) -> Iterator[Recording]:
    """Record the steps that a pipeline runs in the block, on all of its processes alike.

    They exchange their records when it ends.

        with pipeline.record(skip=2) as run:
            trainer.fit(module, data)
        pipeline.timeline(run)

    skip: steps not recorded at first, which allocate and compile. steps: how many are; None for all. activations: on a CPU,
    whether memory is that of all tensors saved for backward (which slows forwards), else of what crosses the cuts only. On a
    GPU it is always all memory allocated since the step began, and times are the device's own. Raises PlanError within another.
    """
    run = Recording(skip, steps, activations)
    run.start()
    try:
        yield run
    finally:
        run.stop()
    run.gather()


def stage_costs(trace: Trace) -> list[UnitCost]:
    """Average each stage's times and saved activation bytes.

    An undivided backward counts as that of inputs.
    """
    found: dict[tuple[int, str], list[float]] = {}
    for lane in by_process(trace):
        live = 0
        for span in lane:
            stage, kind = span.action.stage, span.action.kind
            found.setdefault((stage, kind), []).append(span.end - span.start)
            if kind == "F":
                found.setdefault((stage, "saved_activation_bytes"), []).append(span.live - live)
            live = span.live

    def mean(stage: int, what: str) -> float:
        return max(0.0, fmean(found.get((stage, what), [0.0])))

    split = {stage for stage, kind in found if kind == "I"}
    return [
        UnitCost(
            mean(stage, "F"),
            mean(stage, "I" if stage in split else "B"),
            mean(stage, "W"),
            saved_activation_bytes=round(mean(stage, "saved_activation_bytes")),
        )
        for stage in range(trace.stages)
    ]


@contextmanager
def recorded_step(
    stages: list[Any], schedule: str, micro_batches: int, group: Any, device: torch.device
) -> Iterator[None]:
    """Record one run of a schedule, if a recording wants it.

    stages: those of this process, whose ``recorder`` is set meanwhile.
    """
    run = _current.get()
    if run is None or not run._records_next():
        yield
        return
    modules = [stage.submod for stage in stages]
    recorder = ActionRecorder(stages[0].group_rank, modules, device, run.activations)
    for stage in stages:
        stage.recorder = recorder
    try:
        yield
    finally:
        for stage in stages:
            stage.recorder = None
    spans = tuple(recorder.spans())
    trace = Trace(schedule, stages[0].group_size, stages[0].num_stages, micro_batches, spans)
    run._taken.append((trace, recorder.began))
    run._group, run._device = group, device


class ActionRecorder:
    """Record what one process does in one step, by the device's clock if it has one."""

    def __init__(self, rank: int, modules: Iterable[nn.Module], device: torch.device, activations: bool) -> None:
        self.rank, self.device, self.on_gpu = rank, device, device.type == "cuda"
        self.activations = activations and not self.on_gpu
        self._marks: list[tuple[Action, Any, Any, int]] = []
        self._held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._uses: Counter[int] = Counter()
        self._bytes = 0
        kept = (x for module in modules for x in (*module.parameters(), *module.buffers())) if self.activations else ()
        self._kept = {_storage(x)[0] for x in kept}
        if self.on_gpu:
            torch.cuda.synchronize(device)
            self._bytes = torch.cuda.memory_allocated(device)
        self.began = time.perf_counter()
        self._zero = self.mark()

    def mark(self) -> Any:
        """Return a mark of now, in the work that the device was given so far."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def during(self, action: Action) -> AbstractContextManager[Any]:
        """Give the context that ``action`` runs in, to see what it saves."""
        if not self.activations or action.kind != "F":
            return nullcontext()
        key = (action.stage, action.micro_batch)

        def pack(saved: Tensor) -> Tensor:
            self._hold(key, saved)
            return saved

        return saved_tensors_hooks(pack, lambda saved: saved)

    def record_action(self, action: Action, start: Any, boundary: Iterable[Iterable[Any]] = ()) -> None:
        """Record ``action`` from ``start`` until now.

        boundary: what the stage keeps of a forward until its backward: outputs, inputs.
        """
        end = self.mark()
        if self.on_gpu:
            self._marks.append((action, start, end, torch.cuda.memory_allocated(self.device) - self._bytes))
            return
        key = (action.stage, action.micro_batch)
        if action.kind == "F":
            for tensors in boundary:
                for leaf in tensors:
                    if isinstance(leaf, Tensor):
                        self._hold(key, leaf)
        elif action.kind in "BW":
            self._release(key)
        self._marks.append((action, start, end, self._bytes))

    def spans(self) -> Iterator[Span]:
        """Yield all that was taken down, in seconds since the step began."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        for action, start, end, live in self._marks:
            yield Span(self.rank, action, self._since(start), self._since(end), live)

    def _since(self, mark: Any) -> float:
        return float(self._zero.elapsed_time(mark)) / 1000 if self.on_gpu else float(mark - self._zero)

    def _hold(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Count the bytes of a tensor's memory, once for all that share it; parameters do not count."""
        where, size = _storage(tensor)
        if where in self._kept:
            return
        self._held.setdefault(key, []).append((where, size))
        self._uses[where] += 1
        if self._uses[where] == 1:
            self._bytes += size

    def _release(self, key: tuple[int, int]) -> None:
        for where, size in self._held.pop(key, ()):
            self._uses[where] -= 1
            if not self._uses[where]:
                del self._uses[where]
                self._bytes -= size


def _storage(tensor: Tensor) -> tuple[int, int]:
    local = getattr(tensor, "_local_tensor", tensor)
    memory = local.untyped_storage()
    return memory.data_ptr(), memory.nbytes()


def _clock_offset(group: dist.ProcessGroup, device: torch.device) -> float:
    """Measure the offset to add to this process's clock for that of the group's first.

    All processes of the group call it.

    Cristian's algorithm: the answer to a message was written halfway between sending and receiving, up to half of that time.
    """
    rank, box, best = dist.get_rank(group), torch.zeros(1, dtype=torch.float64, device=device), (float("inf"), 0.0)
    if rank == 0:
        for other in range(1, dist.get_world_size(group)):
            for _ in range(_ROUND_TRIPS):
                dist.recv(box, group=group, group_src=other)
                box.fill_(time.perf_counter())
                dist.send(box, group=group, group_dst=other)
        return 0.0
    for _ in range(_ROUND_TRIPS):
        sent = time.perf_counter()
        dist.send(box, group=group, group_dst=0)
        dist.recv(box, group=group, group_src=0)
        theirs, back = float(box), time.perf_counter()
        best = min(best, (back - sent, theirs - (sent + back) / 2))
    return best[1]


def _merge_traces(parts: Iterable[tuple[Trace, float]]) -> Trace:
    """Return one step from its parts, each with when it began on the common clock."""
    parts = list(parts)
    first = min(begin for _, begin in parts)
    moved = [
        replace(trace, spans=tuple(replace(s, start=s.start + at, end=s.end + at) for s in trace.spans))
        for trace, at in ((trace, begin - first) for trace, begin in parts)
    ]
    trace = Trace.merge(moved)
    return replace(trace, waits=waits(trace))


def waits(trace: Trace) -> dict[Action, float]:
    """Return the idle seconds before each action that receives from another process.

    They are those in which its own process did nothing.
    """
    spans, found = {span.action: span for span in trace.spans}, {}
    begin = min(span.start for span in trace.spans)
    for rank, lane in enumerate(by_process(trace)):
        last = begin
        for span in lane:
            before = source(span.action, trace, spans)
            if before is not None and before.rank != rank:
                found[span.action] = max(0.0, span.start - last)
            last = max(last, span.end)
    return found
