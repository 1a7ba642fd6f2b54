"""Define the pipeline stage of torch's schedules: forward, backward, send and receive.

`engine` makes one for each stage of this process; torch's schedules call its methods, some of them private, so their names and order are
torch's. It replaces torch's own stage, which

- runs the model on uninitialised memory to learn shapes (here they are given), and keeps buffers for every micro-batch;
- loses, when backward is split, the gradients of a stage whose inputs need none, and of weights that no input of the stage meets
  (see `split_backward`);
- cannot run steps without backward if the two stages of a process are neighbours;
- cannot tell which action it was at when it failed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from arclight.parallel.pipeline.runtime.boundary import Boundary, check_given, check_returned
from arclight.parallel.pipeline.runtime.recording import ActionRecorder
from arclight.parallel.pipeline.runtime.split_backward import backward_of_inputs
from arclight.parallel.pipeline.runtime.torch_pipelining import Progress, StageBase
from arclight.parallel.pipeline.schedule.actions import Action, Kind


def _recorded(kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method that does ``kind`` for a micro-batch, to record when it runs.

    The stage's recorder, if it has one, does so.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: Stage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            if self.recorder is None or (kind != "F" and not self.has_backward):
                return method(self, micro_batch, *args, **kwargs)
            action = Action(self.stage_index, "I" if kwargs.get("full_backward") is False else kind, micro_batch)
            with self.recorder.during(action):
                start = self.recorder.mark()
                result = method(self, micro_batch, *args, **kwargs)
            self.recorder.record_action(action, start, self.fwd_cache.get(micro_batch, ()))
            return result

        return run

    return decorate


class Stage(StageBase):
    """One stage of this process: its part of the model, and the exchanges of each micro-batch."""

    def __init__(
        self, part: nn.Module, number: int, stages: int, device: torch.device, group: dist.ProcessGroup | None,
        before: list[Boundary], after: list[Boundary],
    ) -> None:  # fmt: skip
        """Initialise the stage.

        before, after: for each micro-batch what the stages before and after exchange with this one. group: None for one
        process.
        """
        # What torch's schedules look at. Its own __init__ would ask for a process group also if there is one process.
        self.submod, self.stage_index, self.num_stages, self.device, self.group = part, number, stages, device, group
        self.group_rank = dist.get_rank(group) if group is not None else 0
        self.group_size = dist.get_world_size(group) if group is not None else 1
        self.stage_index_to_group_rank = {number: number % self.group_size for number in range(stages)}
        self.args_recv_info = {0: ()}
        self.act_send_info: dict[int, Any] = {}
        self.has_backward = False
        self.before, self.after = before, after
        self.progress = Progress()
        self.recorder: ActionRecorder | None = None
        self.passes_locally = False
        """Whether the next stage is this process's too and is given the output by torch's schedule."""
        self.fwd_cache: dict[int, Any] = {}
        self.bwd_cache: dict[int, Any] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, tuple[Tensor | None, ...]] = {}
        """Gradients of the outputs, received from the next stage."""
        self._rests: dict[int, Callable[[], None]] = {}
        """What is left of a split backward, by micro-batch: the gradients of the weights (W)."""

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        """Do nothing: a stage knows what it exchanges from the start."""

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        """Do nothing: a backward exchanges what the forward did."""

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        raise NotImplementedError("a stage knows what it receives from the start")

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return nothing: the exchange of shapes has connected the neighbours."""
        return []

    def clear_runtime_states(self) -> None:
        for kept in (self.fwd_cache, self.bwd_cache, self._inputs, self._gradients, self._rests):
            kept.clear()

    # -- exchanges: memory for a tensor is held from its arrival to its use ----------------------------------------

    def _peer(self, operation: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self.progress.awaited = (self.stage_index, "F", fwd_chunk_id)
        buffers = self._inputs[fwd_chunk_id] = tuple(shape.empty(self.device) for shape in self.before[fwd_chunk_id])
        return [self._peer(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self.progress.awaited = (self.stage_index, "B", bwd_chunk_id)
        shapes = self.after[bwd_chunk_id]
        buffers = tuple(shape.empty(self.device) if shape.returns else None for shape in shapes)
        self._gradients[bwd_chunk_id] = buffers
        return [self._peer(dist.irecv, buffer, self.stage_index + 1) for buffer in buffers if buffer is not None]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs = self.fwd_cache[fwd_chunk_id][0] if self.has_backward else self.fwd_cache.pop(fwd_chunk_id)[0]
        return [self._peer(dist.isend, output.detach(), self.stage_index + 1) for output in outputs]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        found = zip(self.bwd_cache.pop(bwd_chunk_id), self.before[bwd_chunk_id], strict=True)
        sent = [shape.empty(self.device).zero_() if grad is None else grad for grad, shape in found if shape.returns]
        return [self._peer(dist.isend, gradient.contiguous(), self.stage_index - 1) for gradient in sent]

    # -- two stages of one process that are neighbours -------------------------------------------------------------

    def set_local_fwd_input(self, prev_stage_outputs: tuple[Tensor, ...], mb_index: int) -> None:
        self._inputs[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self.bwd_cache.pop(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self._gradients[mb_index] = next_stage_bwd_outputs

    # -- forward and backward --------------------------------------------------------------------------------------

    def _begin(self, kind: Kind, micro_batch: int) -> None:
        self.progress.computing = (self.stage_index, kind, micro_batch)

    def _end(self) -> None:
        self.progress.computing = None
        self.progress.done += 1

    @_recorded("F")
    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._begin("F", fwd_chunk_id)
        given: tuple[Tensor, ...] = ()
        if not self.is_first:
            given = self._inputs.pop(fwd_chunk_id)
            if self.has_backward:
                for tensor, shape in zip(given, self.before[fwd_chunk_id], strict=True):
                    tensor.requires_grad_(shape.requires_grad)
        output = self.submod(*given, **kwargs)
        if not self.is_last:
            check_given(output, self.after[fwd_chunk_id], self.has_backward)
        if self.has_backward or not (self.is_last or self.passes_locally):
            self.fwd_cache[fwd_chunk_id] = (output if isinstance(output, tuple) else (output,), given)
        self._end()
        return output

    @_recorded("B")
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:  # fmt: skip
        if not self.has_backward:
            return
        self._begin("B" if full_backward else "I", bwd_chunk_id)
        outputs, given = self.fwd_cache.pop(bwd_chunk_id)
        gradients = (torch.ones_like(loss),) if self.is_last else self._gradients.pop(bwd_chunk_id)
        pairs = [(x, grad) for x, grad in zip(outputs, gradients, strict=True) if x.requires_grad and grad is not None]
        roots, arrived = [output for output, _ in pairs], [gradient for _, gradient in pairs]
        wanted = [x for x in given if x.requires_grad]
        self._defer_reduction()
        if full_backward:
            if roots:
                torch.autograd.backward(roots, arrived)
            found = [tensor.grad for tensor in given]
            for tensor in wanted:
                tensor.grad = None
        elif wanted and roots:
            inner, rest = backward_of_inputs(roots, arrived, wanted, self.submod.parameters())
            self._rests[bwd_chunk_id] = rest.run
            by_input = iter(inner)
            found = [next(by_input) if tensor.requires_grad else None for tensor in given]
            if self.is_last:
                loss.detach_()  # torch keeps the losses until the step is over, and with them would keep the graph
        else:  # nobody waits for a gradient of what came in: all of this backward is done when that of the weights is due
            if roots:
                self._rests[bwd_chunk_id] = lambda: torch.autograd.backward(roots, arrived)
            found = [None] * len(given)
        if not self.is_first:
            check_returned(found, self.before[bwd_chunk_id])
        self.bwd_cache[bwd_chunk_id] = tuple(found)
        self._end()

    @_recorded("W")
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        self._begin("W", bwd_chunk_id)
        self._defer_reduction()
        if (rest := self._rests.pop(bwd_chunk_id, None)) is not None:
            rest()
        self._end()

    def _defer_reduction(self) -> None:
        """Keep FSDP from reducing gradients in this backward: the schedule says when."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)
