"""torch.distributed.pipelining behind one file: schedules by name, and a stage that says itself what it exchanges.

All names of torch that are not public are here (torch 2.13). Schedules are torch's own where it has them. The stage is ours where torch's

- runs the model on uninitialised memory to learn shapes (here they are told), and keeps buffers for every micro-batch;
- loses the gradients of a stage below which all is frozen, when backward is split (here such a backward is done in one, late);
- cannot run forwards only where the two stages of a process are neighbours.

Schedules that torch does not have are orders of ours, or of a file, in torch's runtime of actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._utils import _TensorMeta
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
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from arclight.parallel.pipeline.actions import Action, Kind
from arclight.parallel.pipeline.orders import is_file, load_order, order_of, parse_name, shape_of, splits_backward
from arclight.parallel.pipeline.recording import Recorder, recorded_step
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class ScheduleKind:
    """What must be known of a schedule before it is built."""

    name: str
    """By which `arclight.parallel.pipeline.orders.order_of` gives its actions."""
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


def _by_order(name: str) -> Callable[..., Any]:
    """Builds torch's runtime of actions for the order called ``name``: sends and receives are put in by torch."""
    kinds = {
        "F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD,
        "I": _ComputationType.BACKWARD_INPUT, "W": _ComputationType.BACKWARD_WEIGHT,
    }  # fmt: skip

    def build(stages: Any, micro_batches: int, **options: Any) -> Any:
        own = stages if isinstance(stages, list) else [stages]
        runtime = _PipelineScheduleRuntime(own, micro_batches, **options)
        order = order_of(name, own[0].group_size, micro_batches)
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
    """``kind``, or one for the same stages on the same processes that takes any number of micro-batches.

    It is also that for forwards only, where all orders are as good.
    """
    if backward and kind.fits(micro_batches, processes):
        return kind
    if kind.stages_per_process == 1:
        return SCHEDULES["GPipe"]
    return SCHEDULES["ZBVZeroBubble" if kind.v_shaped else "LoopedBFS"]


@dataclass(frozen=True)
class TensorShape:
    """A tensor that one stage gives to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, requires_grad: bool) -> TensorShape:
        return cls(tuple(tensor.shape), tensor.dtype, requires_grad and tensor.is_floating_point())

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def meta(self, requires_grad: bool) -> _TensorMeta:
        stride = torch.empty(self.shape, device="meta").stride()
        return _TensorMeta(torch.Size(self.shape), stride, self.dtype, requires_grad)


Boundary = tuple[TensorShape, ...]
"""What crosses the cut between two stages for one micro-batch."""


def _recorded(kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of a stage that does ``kind`` for the micro-batch it is given, seen by the stage's recorder if there is one."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: Stage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            if self.recorder is None or (kind != "F" and not self.has_backward):
                return method(self, micro_batch, *args, **kwargs)
            action = Action(self.stage_index, "I" if kwargs.get("full_backward") is False else kind, micro_batch)
            with self.recorder.during(action):
                start = self.recorder.mark()
                result = method(self, micro_batch, *args, **kwargs)
            self.recorder.took(action, start, self.fwd_cache.get(micro_batch, ()))
            return result

        return run

    return around


class Stage(_PipelineStageBase):
    """One stage of this process: its part of the model, and for each micro-batch what comes in and goes out."""

    def __init__(
        self, part: nn.Module, number: int, stages: int, device: torch.device, group: dist.ProcessGroup,
        before: list[Boundary], after: list[Boundary],
    ) -> None:  # fmt: skip
        """before, after: for each micro-batch what the stages before and after exchange with this one."""
        super().__init__(part, number, stages, device, group)
        self.before, self.after = before, after
        self.recorder: Recorder | None = None
        self._sending = 0

    # -- who exchanges what ----------------------------------------------------------------------------------------

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        for number in range(num_microbatches):
            if self.is_first:
                roots = [_RecvInfo(f"argument {i}", None, None, None, is_root_arg=True) for i in range(len(args))]
                self.args_recv_info[number] = tuple(roots)
            else:
                self.args_recv_info[number] = tuple(
                    _RecvInfo(f"activation {i}", self.stage_index - 1, None, shape.meta(shape.requires_grad))
                    for i, shape in enumerate(self.before[number])
                )
        infos = self.args_recv_info[0]
        self._stage_meta.inputs = tuple(info.tensor_meta for info in infos)  # type: ignore[misc]
        self._stage_meta.input_grads = tuple(_gradient(shape) for shape in self.before[0]) if not self.is_first else ()
        self.act_send_info = (
            {i: [self.stage_index + 1] for i in range(len(self.after[0]))} if not self.is_last else {0: []}
        )
        self.grad_send_info = None

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self._setup_backward_recv_info(num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for number in range(num_microbatches):
            shapes = () if self.is_last else self.after[number]
            self.grad_recv_info[number] = tuple(
                _RecvInfo(f"gradient {i}", self.stage_index + 1, None, _gradient(shape))
                for i, shape in enumerate(shapes)
            )

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        raise NotImplementedError("a stage knows what it receives from the start")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Nothing is sent to warm up: the exchange of shapes was the first."""
        return []

    # -- memory for what arrives, from its arrival to its use ------------------------------------------------------

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if info.tensor_meta is not None:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        activations: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.args_recv_info[fwd_chunk_id])
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._sending = bwd_chunk_id
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _get_grad_send_meta(self, input_idx: int) -> Any:
        return _gradient(self.before[self._sending][input_idx])

    # -- two stages of one process that are neighbours -------------------------------------------------------------

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        for info, shape in zip(self.grad_recv_info[mb_index], self.after[mb_index], strict=True):
            if info.tensor_meta is not None:
                info.buffer = torch.zeros(shape.shape, dtype=shape.dtype, device=self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    # -- forward and backward --------------------------------------------------------------------------------------

    @_recorded("F")
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    @_recorded("B")
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:  # fmt: skip
        if self.has_backward and not full_backward and not self.is_first:
            output, given = self.fwd_cache[bwd_chunk_id]
            if not any(isinstance(x, Tensor) and x.requires_grad for x in given):
                # Nobody waits for a gradient of the inputs: all of this backward is done when that of the weights is due.
                self.fwd_cache.pop(bwd_chunk_id)
                received = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
                self.backward_state[bwd_chunk_id] = (given, _LATE, loss if self.is_last else output, received)
                self.dw_runner[bwd_chunk_id] = lambda: None
                self.bwd_cache[bwd_chunk_id] = (None,) * len(self.before[0])
                return
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    @_recorded("W")
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        state = self.backward_state.get(bwd_chunk_id)
        if state is None or state[1] is not _LATE:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            return
        given, _, output, received = self.backward_state.pop(bwd_chunk_id)
        self.dw_runner.pop(bwd_chunk_id)
        if any(x.requires_grad for x in ((output,) if isinstance(output, Tensor) else output)):
            whole = {"stage_output": output, "output_grads": received, "input_values": given}
            self.backward_maybe_with_nosync("full", whole, last_backward=last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)


_LATE: Any = object()


def _gradient(shape: TensorShape) -> _TensorMeta | None:
    return shape.meta(requires_grad=False) if shape.requires_grad else None


def _let_go(infos: tuple[_RecvInfo, ...]) -> None:
    for info in infos:
        info.buffer = None


class Schedule:
    """A schedule of torch over the stages of this process, for a number of micro-batches."""

    def __init__(self, kind: ScheduleKind, stages: list[Stage], micro_batches: int, backward: bool) -> None:
        """The last stage gives the loss of a micro-batch. backward: whether gradients are computed, or losses only."""
        single = kind.stages_per_process == 1
        self._stages, self._kind = stages, kind
        self._schedule = kind.build(
            stages[0] if single else stages, micro_batches, loss_fn=lambda loss, _: loss * 1, scale_grads=False
        )
        self._schedule._has_backward = backward

    def run(self, arguments: list[tuple[Any, ...]], keywords: list[dict[str, Any]]) -> None:
        """Take all micro-batches, given to every process, through all stages."""
        for stage in self._stages:
            stage.has_backward = self._schedule._has_backward
            stage.clear_runtime_states()
        name = next(name for name, kind in SCHEDULES.items() if kind is self._kind)
        first = self._stages[0]
        with recorded_step(self._stages, name, len(arguments), first.group, first.device):
            self._schedule._step_microbatches(arguments, keywords, [None] * len(arguments), return_outputs=False)
        for stage in self._stages:
            stage.clear_runtime_states()


# -- tensors without data (for `holes`) --------------------------------------------------------------------------------

plain_torch_function: Any = torch._C._disabled_torch_function_impl
"""For a subclass whose operations are seen where they are dispatched, and not before."""


def wrapper(cls: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` without memory, with the sizes and type of ``like``, that says it lies on ``device``."""
    return Tensor._make_wrapper_subclass(
        cls, like.size(), strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
    )
