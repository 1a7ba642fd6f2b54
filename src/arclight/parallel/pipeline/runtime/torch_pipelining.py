"""Adapt torch.distributed.pipelining: run its schedules over stages of ours.

`engine` runs a `Schedule`; `stage` derives from `StageBase`. What is imported from torch's pipelining, private names included, is imported
here only (torch 2.13). Schedules are torch's own if it has them (`_NATIVE`); others are orders of ours, or of a file, in torch's runtime of
actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from arclight.parallel.pipeline.runtime.recording import recorded_step
from arclight.parallel.pipeline.schedule.actions import Action, Kind
from arclight.parallel.pipeline.schedule.table import ScheduleKind

_NATIVE: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
"""Torch's own classes. Its DualPipeV is not used: it sends a forward's output only after the paired backward, which doubles the bubble."""
_TORCH_KINDS = {
    "F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT, "W": _ComputationType.BACKWARD_WEIGHT,
}  # fmt: skip


@dataclass
class Progress:
    """Track how far a process is in a step, so that an error can say what failed."""

    computing: tuple[int, Kind, int] | None = None
    """Stage, kind and micro-batch of the running action; None between actions."""
    awaited: tuple[int, Kind, int] | None = None
    """Action for which another process was last waited for."""
    done: int = 0
    """Actions that are over."""


class StageBase(_PipelineStageBase):
    """Torch's stage, with the attributes that `Schedule` reads and sets."""

    progress: Progress
    recorder: Any
    passes_locally: bool
    """True if the next stage is in the same process."""


class Schedule:
    """Run a schedule over the stages of this process, for a number of micro-batches."""

    def __init__(self, kind: ScheduleKind, stages: Sequence[StageBase], micro_batches: int, backward: bool) -> None:
        """Initialise the schedule; the last stage gives the loss of a micro-batch.

        backward: False for losses only, without gradients.
        """
        self._stages, self.progress, self._name = list(stages), stages[0].progress, kind.name
        own = {stage.stage_index for stage in stages}
        for stage in stages:
            stage.progress, stage.passes_locally = self.progress, stage.stage_index + 1 in own
        self._schedule = _built(kind, self._stages, micro_batches)
        self._schedule._has_backward = backward

    def run(self, keywords: list[dict[str, Any]]) -> None:
        """Take all micro-batches, given to every stage as keyword arguments, through all stages."""
        self.progress.computing = self.progress.awaited = None
        self.progress.done = 0
        for stage in self._stages:
            stage.has_backward = self._schedule._has_backward
        try:
            nothing = [None] * len(keywords)
            with recorded_step(self._stages, self._name, len(keywords), self._stages[0].group, self._stages[0].device):
                self._schedule._step_microbatches([()] * len(keywords), keywords, nothing, return_outputs=False)
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()

    def at(self) -> tuple[Action | None, bool]:
        """Return the action this process is at, or failed at, and if it computes or waits.

        The action is None at a step's end.
        """
        if self.progress.computing is not None:
            return Action(*self.progress.computing), True
        if not isinstance(self._schedule, _PipelineScheduleRuntime):
            return (Action(*self.progress.awaited) if self.progress.awaited else None), False
        todo = [action for action in self._actions() if self._schedule._has_backward or action.kind == "F"]
        return (todo[self.progress.done] if self.progress.done < len(todo) else None), False

    def _actions(self) -> list[Action]:
        """List what this process computes, in order."""
        own: list[Action] = []
        for action in self._schedule.pipeline_order_with_comms[self._stages[0].group_rank]:
            for one in action.sub_actions or (action,):
                if one.is_compute_op and one.microbatch_index is not None:
                    own.append(Action.parse(str(one)))
        return own


def _built(kind: ScheduleKind, stages: list[StageBase], micro_batches: int) -> Any:
    """Build torch's schedule for ``kind``: its own class, or its runtime of actions.

    The runtime inserts sends and receives.
    """
    options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    alone = stages[0].group is None
    native = _NATIVE.get(kind.name.partition(":")[0])
    if native is not None and kind.trimmed_from is None and not alone:
        return native(stages[0] if kind.stages_per_process == 1 else stages, micro_batches, **options)
    runtime = _PipelineScheduleRuntime(stages, micro_batches, **options)
    if alone:
        runtime._prepare_schedule_with_comms({0: _one_by_one(len(stages), micro_batches)})
        return runtime
    order = kind.order(stages[0].group_size, micro_batches)
    actions: dict[int, list[_Action | None]] = {
        rank: [_Action(a.stage, _TORCH_KINDS[a.kind], a.micro_batch) for a in one] for rank, one in enumerate(order)
    }
    runtime.pipeline_order = actions
    runtime._prepare_schedule_with_comms(actions)
    return runtime


def _one_by_one(stages: int, micro_batches: int) -> list[_Action | None]:
    """Give the order of one process that has all stages."""
    return [
        _Action.from_str(text)
        for number in range(micro_batches)
        for text in ([f"{s}F{number}" for s in range(stages)] + [f"{s}B{number}" for s in reversed(range(stages))])
    ]
