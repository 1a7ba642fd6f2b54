"""torch.distributed.pipelining behind one file: schedules by name, run over stages of ours.

All names of torch that are not public are here (torch 2.13). Schedules are torch's own where it has them; others are orders of ours, or of a
file, in torch's runtime of actions. The stages are in `stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
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
from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.orders import (
    first_of,
    is_file,
    load_order,
    order_of,
    parse_name,
    shape_of,
    splits_backward,
)
from arclight.parallel.plan import PlanError

if TYPE_CHECKING:
    from arclight.parallel.pipeline.runtime.stage import Stage


StageBase = _PipelineStageBase
"""What torch's schedules take stages to be."""


@dataclass(frozen=True)
class ScheduleKind:
    """What must be known of a schedule before it is built."""

    name: str
    """By which `arclight.parallel.pipeline.schedule.orders.order_of` gives its actions."""
    build: Callable[..., Any]
    stages_per_process: int = 1
    v_shaped: bool = False
    """Whether a process has stages i and n - 1 - i, else i and i + processes."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of activations, which compiled code cannot."""
    fewest: Callable[[int], int] = lambda processes: 1
    """Least number of micro-batches."""
    whole_rounds: bool = False
    """Whether micro-batches must come in rounds of equal length, of at least one for each process."""
    only: tuple[int, int] | None = None
    """The numbers of processes and of micro-batches that it is for, where it is for no others (a file)."""

    def fits(self, micro_batches: int, processes: int) -> bool:
        if self.only is not None:
            return self.only == (processes, micro_batches)
        if micro_batches < self.fewest(processes):
            return False
        return not self.whole_rounds or micro_batches % max(1, micro_batches // processes) == 0


def _by_order(name: str, made_for: int | None = None) -> Callable[..., Any]:
    """Builds torch's runtime of actions for the order called ``name``: sends and receives are put in by torch.

    made_for: the number of micro-batches of the order, where it has more than there are; those are left out.
    """
    kinds = {
        "F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD,
        "I": _ComputationType.BACKWARD_INPUT, "W": _ComputationType.BACKWARD_WEIGHT,
    }  # fmt: skip

    def build(stages: Any, micro_batches: int, **options: Any) -> Any:
        own = stages if isinstance(stages, list) else [stages]
        runtime = _PipelineScheduleRuntime(own, micro_batches, **options)
        order = first_of(order_of(name, own[0].group_size, made_for or micro_batches), micro_batches)
        actions: dict[int, list[_Action | None]] = {
            rank: [_Action(a.stage, kinds[a.kind], a.micro_batch) for a in one] for rank, one in enumerate(order)
        }
        runtime.pipeline_order = actions
        runtime._prepare_schedule_with_comms(actions)
        return runtime

    return build


def _single(name: str, build: Callable[..., Any], **more: Any) -> ScheduleKind:
    return ScheduleKind(name, build, 1, **more)


def _looped(name: str, build: Callable[..., Any], **more: Any) -> ScheduleKind:
    return ScheduleKind(name, build, 2, **more)


def _in_a_v(name: str, build: Callable[..., Any], **more: Any) -> ScheduleKind:
    return ScheduleKind(name, build, 2, v_shaped=True, splits_backward=True, **more)


SCHEDULES = {
    kind.name: kind
    for kind in (
        _single("GPipe", ScheduleGPipe),
        _single("1F1B", Schedule1F1B, fewest=lambda processes: processes),
        _looped("LoopedBFS", ScheduleLoopedBFS),
        _looped("Interleaved1F1B", ScheduleInterleaved1F1B, whole_rounds=True),
        _looped("InterleavedZeroBubble", ScheduleInterleavedZeroBubble, splits_backward=True, whole_rounds=True),
        _in_a_v("ZBVZeroBubble", ScheduleZBVZeroBubble),
        # Torch's own sends what a forward gives only when the backward that is paired with it is over, which doubles the bubble.
        _in_a_v("DualPipeV", _by_order("DualPipeV"), fewest=lambda processes: 2 * processes),
        _single("ZB-H1", _by_order("ZB-H1"), splits_backward=True),
        _single("ZB-H2", _by_order("ZB-H2"), splits_backward=True),
        _in_a_v("V-Half", _by_order("V-Half")),
        _in_a_v("V-Min", _by_order("V-Min")),
        _in_a_v("V-ZB", _by_order("V-ZB")),
    )
}


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule called ``name``, in any case of letters, or that of a CSV file (see `orders.order_of`).

    Raises PlanError for a name that there is not, and for a file that cannot be run.
    """
    if is_file(name):
        try:
            changed = Path(name).stat().st_mtime_ns
        except OSError as error:
            raise PlanError(f"the schedule {name} cannot be read: {error.strerror}") from error
        return _file_kind(name, changed)
    known, own = parse_name(name)
    kind = SCHEDULES[known]
    return kind if own == kind.stages_per_process else replace(kind, name=f"{known}:{own}", stages_per_process=own)


@lru_cache(maxsize=32)
def _file_kind(path: str, changed: int) -> ScheduleKind:
    order = load_order(path)
    stages, micro_batches, v_shaped = shape_of(order)
    return ScheduleKind(
        path, _by_order(path), stages // len(order), v_shaped, splits_backward(order), only=(len(order), micro_batches)
    )


def that_fits(kind: ScheduleKind, micro_batches: int, processes: int, backward: bool = True) -> ScheduleKind:
    """``kind``, or one for the same stages on the same processes that takes this number of micro-batches.

    That is ``kind`` for the next larger number that it takes, without those that are not there: nothing is held that was not before.
    A simple one where there is no larger number (of a file), and for forwards only, where all orders are as good.
    """
    if backward and kind.fits(micro_batches, processes):
        return kind
    larger = range(micro_batches, 2 * (micro_batches + processes) + 1)
    near = next((n for n in (*larger, *(kind.only or ())[1:]) if n >= micro_batches and kind.fits(n, processes)), None)
    if backward and near is not None:
        return replace(kind, build=_by_order(kind.name, near), fewest=_one, whole_rounds=False, only=None)
    if kind.stages_per_process == 1:
        return SCHEDULES["GPipe"]
    return SCHEDULES["ZBVZeroBubble" if kind.v_shaped else "LoopedBFS"]


def _one(processes: int) -> int:
    return 1


class Schedule:
    """A schedule of torch over the stages of this process, for a number of micro-batches."""

    def __init__(self, kind: ScheduleKind, stages: list[Stage], micro_batches: int, backward: bool) -> None:
        """The last stage gives the loss of a micro-batch. backward: whether gradients are computed, or losses only."""
        self._stages, self.progress, self._name = stages, stages[0].progress, kind.name
        own = {stage.stage_index for stage in stages}
        for stage in stages:
            stage.progress, stage.hands_over = self.progress, stage.stage_index + 1 in own
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if stages[0].group is None:
            self._schedule = _PipelineScheduleRuntime(stages, micro_batches, **options)
            self._schedule._prepare_schedule_with_comms({0: _one_by_one(len(stages), micro_batches)})
        else:
            single = kind.stages_per_process == 1
            self._schedule = kind.build(stages[0] if single else stages, micro_batches, **options)
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
        """What this process is at, or was when it failed, and whether it computes that or waits for it; None at the end of a step."""
        if self.progress.computing is not None:
            return Action(*self.progress.computing), True
        if not isinstance(self._schedule, _PipelineScheduleRuntime):
            return (Action(*self.progress.awaited) if self.progress.awaited else None), False
        todo = [action for action in self._actions() if self._schedule._has_backward or action.kind == "F"]
        return (todo[self.progress.done] if self.progress.done < len(todo) else None), False

    def _actions(self) -> list[Action]:
        """What this process computes, in order."""
        own: list[Action] = []
        for action in self._schedule.pipeline_order_with_comms[self._stages[0].group_rank]:
            for one in action.sub_actions or (action,):
                if one.is_compute_op and one.microbatch_index is not None:
                    own.append(Action.parse(str(one)))
        return own


def _one_by_one(stages: int, micro_batches: int) -> list[_Action | None]:
    """The order of one process that has all stages."""
    return [
        _Action.from_str(text)
        for number in range(micro_batches)
        for text in ([f"{s}F{number}" for s in range(stages)] + [f"{s}B{number}" for s in reversed(range(stages))])
    ]


# -- tensors without data (for `holes`) --------------------------------------------------------------------------------

plain_torch_function: Any = torch._C._disabled_torch_function_impl
"""For a subclass whose operations are seen where they are dispatched, and not before."""


def wrapper(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` without memory, with the sizes and type of ``like``, that says it lies on ``device``."""
    return Tensor._make_wrapper_subclass(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
    )
