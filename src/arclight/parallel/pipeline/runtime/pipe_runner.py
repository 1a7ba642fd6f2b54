"""Run the batches of a split model on the ranks of a group, without a Trainer.

`Pipe.on` makes a `PipeRunner`; users call `step`, `evaluate`, `clip_grad_norm_` and `state_dict` on every rank, with the same batch.
The work is done by `engine`. Methods and fields of `Result` are public; parameter names in states are the whole model's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.pipeline.call_graph import CallGraph
from arclight.parallel.pipeline.runtime.batch_splitting import (
    Spec,
    detached,
    merge_outputs,
    samples_in,
    split_arguments,
)
from arclight.parallel.pipeline.runtime.consistency_check import PipelineFingerprint, digest
from arclight.parallel.pipeline.runtime.engine import Engine
from arclight.parallel.pipeline.runtime.loss_reduction import LossReduction, ReductionKind, no_loss
from arclight.parallel.pipeline.runtime.runner import forward_backward, forward_only
from arclight.parallel.pipeline.runtime.stage_program import Loss, PipelineTopology, StageProgram
from arclight.parallel.pipeline.runtime.tied_parameters import TiedParameters, sum_gradients_over
from arclight.parallel.pipeline.schedule.table import ScheduleKind, schedule_kind
from arclight.parallel.plan import PlanError
from arclight.parallel.step_protocol import Split

Where = Literal["nowhere", "last", "everywhere"]


class SplitModel(Protocol):
    """Attributes of a `Pipe` that a runner reads."""

    graph: CallGraph
    cuts: tuple[int, ...]
    """First call of each stage."""
    stages: list[Any]
    shared: dict[str, tuple[int, ...]]
    """Stages of each parameter that several have, by its first name."""


@dataclass(frozen=True)
class Result:
    """Loss and count of a step or an evaluation, alike on every process, and outputs."""

    loss: Tensor
    """Loss of the whole batch, float64, without a graph; NaN if nothing counted, or there was no loss."""
    count: Tensor
    """What it is the mean over."""
    outputs: Any = None
    """Outputs of the whole batch, as the model returns them, on processes that requested them; else None."""


@dataclass(frozen=True)
class RunOptions:
    """Configure how batches are run; see `Pipe.on`."""

    schedule: str = "1F1B"
    micro_batches: int = 8
    loss: Callable[[Any, Any], Any] | None = None
    reduction: ReductionKind = "token_mean"
    weight: Callable[[Any], Any] | None = None
    chunks: Mapping[int | str, Spec] | None = None
    outputs: Spec = 0


class PipeRunner:
    """Run batches through the stages of a `Pipe`.

    This process has the stages that the schedule gives it.

    Every process of the pipeline calls the same methods with the same batch. If stages of several processes have a parameter, its
    gradient is summed over them after each step, so that equal copies stay equal under equal optimizers.
    """

    def __init__(
        self, pipe: SplitModel, group: dist.ProcessGroup | None, options: RunOptions, data: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Assign the stages of ``pipe`` to the processes of ``group``.

        group: None for all processes, or for this one if there are no others. data: the processes that run other batches through the
        same stages. Raises PlanError for stages, schedules and processes that do not fit.
        """
        self.pipe, self.options, self.data = pipe, options, data
        if options.micro_batches < 1:
            raise PlanError(f"micro_batches is {options.micro_batches}: a batch is at least one")
        self.reduction = LossReduction(options.loss, options.reduction, options.weight)
        self.topology = topology_of(pipe, options.schedule, group, device)
        self.stages: dict[int, nn.Module] = {number: pipe.stages[number] for number in self.topology.own}
        _refuse_empty(self.stages)
        last = len(pipe.stages) - 1
        parts = {
            n: StageProgram(stage, self.reduction if n == last else None, sliced=True)
            for n, stage in self.stages.items()
        }
        self.engine = Engine(parts, self.topology, self._statement, pipe.shared, _names(pipe))
        self.shared = TiedParameters(self.topology, self.stages, pipe.shared)
        self._warned = False

    def _statement(self) -> PipelineFingerprint:
        options = self.options
        plan = {
            "the number of stages": len(self.pipe.stages), "the calls at which stages begin": list(self.pipe.cuts),
            "the model's graph": digest(self.pipe.graph), "the schedule": self.topology.kind.name,
            "the number of micro-batches": options.micro_batches, "the reduction of losses": options.reduction,
            "chunks": digest(sorted(map(repr, (options.chunks or {}).items()))),
        }  # fmt: skip
        return PipelineFingerprint.of(self.stages, plan, self.pipe.shared)

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of this process's stages, each once, for an optimizer."""
        return list(dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters()))

    # -- running ---------------------------------------------------------------------------------------------------

    def step(self, *args: Any, targets: Any = None, outputs: Where = "nowhere", **kwargs: Any) -> Result:
        """Run forward and backward of a batch, and accumulate this process's gradients.

        args, kwargs: of the model. targets: what the loss is given besides the last stage's output. outputs: on which processes they are wanted.
        """
        micro_batches = self._micro_batches((args, kwargs, targets))
        counts = self.reduction.counts([micro_batch[2] for micro_batch in micro_batches])
        if counts is not None and any(counts) and outputs == "nowhere":  # the gradient of a mean of nothing is NaN
            micro_batches = [one for one, count in zip(micro_batches, counts, strict=True) if count > 0]
        known = self.reduction.divisor(counts)
        known = self._over_data(known) if known is not None else None
        self._prepare(self.reduction, outputs)
        gradients, total, count = forward_backward(
            self.engine, micro_batches, 1.0 / known if known else 1.0, self.shared
        )
        divisor = known if known is not None else self._over_data(float(count))
        if self.data is not None:
            sum_gradients_over(self.data, gradients.parameters, gradients.new)
        gradients.restore(1.0 if known is not None or divisor == 0 else 1.0 / divisor)
        return self._result(total, count, outputs, micro_batches)

    @torch.no_grad()
    def evaluate(self, *args: Any, targets: Any = None, outputs: Where = "last", **kwargs: Any) -> Result:
        """Run the forward of a batch on any schedule.

        Without ``targets`` there are outputs only, and no loss.
        """
        micro_batches = self._micro_batches((args, kwargs, targets))
        self._prepare(self.reduction if targets is not None else no_loss, outputs)
        total, count = forward_only(self.engine, micro_batches)
        return self._result(total, count, outputs, micro_batches)

    def _micro_batches(self, split: Split) -> list[Split]:
        """Cut a batch, and warn once if it has fewer micro-batches than were asked for."""
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_flatten(split)[0]):
            raise PlanError(
                "an input requires a gradient, which a pipeline does not compute: detach it, or make it a parameter"
            )
        micro_batches, reason = split_arguments(split, self.options.micro_batches, self.options.chunks)
        if reason and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Reducing micro-batches from {self.options.micro_batches} to {len(micro_batches)}: {reason}"
            )
        return micro_batches

    def _prepare(self, loss: Loss, outputs: Where) -> None:
        """Give the last stage its loss, and a list for its outputs if they are wanted."""
        if outputs not in ("nowhere", "last", "everywhere"):
            raise PlanError(f"outputs = {outputs!r} is not known; choose 'nowhere', 'last' or 'everywhere'")
        if self.engine.last is not None:
            self.engine.last.loss = loss
            self.engine.last.outputs = [] if outputs != "nowhere" else None

    def _over_data(self, divisor: float) -> float:
        """Sum the divisor over the processes with other batches."""
        if self.data is None or self.reduction.kind == "sum":
            return divisor
        self.engine.wait()
        number = torch.tensor(divisor, dtype=torch.float64, device=self.topology.device)
        dist.all_reduce(number, group=self.data)
        return float(number)

    def _result(self, total: Tensor, count: Tensor, outputs: Where, micro_batches: list[Split]) -> Result:
        if self.data is not None:
            both = torch.stack((total, count))
            dist.all_reduce(both, group=self.data)
            total, count = both[0], both[1]
        loss = total if self.reduction.kind == "sum" else total / count
        found, last = None, self.engine.last
        if last is not None and last.outputs is not None:
            counts = [samples_in(micro_batch, self.options.chunks) for micro_batch in micro_batches]
            found = merge_outputs([detached(output) for output in last.outputs], self.options.outputs, counts)
            last.outputs = None
        if outputs == "everywhere" and self.topology.group is not None:
            found = self._to_all(found)
        return Result(loss, count, found)

    def _to_all(self, tree: Any) -> Any:
        """Broadcast a tree from the last stage's process to every process."""
        source, group, device = self.topology.owner(self.topology.stages - 1), self.topology.group, self.topology.device
        own = [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)] if self.engine.last is not None else []
        box = [tree_map_only(Tensor, lambda x: x.detach().to("meta"), tree)]
        dist.broadcast_object_list(box, source, group=group, device=device)

        def arrived(outline: Tensor) -> Tensor:
            given = own.pop(0).contiguous() if own else torch.empty_like(outline, device=device).contiguous()
            dist.broadcast(given, source, group=group)
            return given

        return tree_map_only(Tensor, arrived, box[0])

    # -- over all stages -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def total_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages; every process calls this.

        A parameter that several stages share counts once.
        """
        own = [
            local_tensor(p.grad)
            for p in self.parameters()
            if p.grad is not None and p not in self.shared.counted_by_others
        ]
        norm = (
            nn.utils.get_total_norm(own, norm_type).to(self.topology.device)
            if own
            else torch.zeros((), device=self.topology.device)
        )
        if self.topology.group is None:
            return norm
        if math.isinf(norm_type):
            largest = norm.double()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.topology.group)
            return largest.to(norm.dtype)
        power = norm.double() ** norm_type
        dist.all_reduce(power, group=self.topology.group)
        return (power ** (1 / norm_type)).to(norm.dtype)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages to ``max_norm``; return the norm before.

        Every process calls this.
        """
        norm = self.total_norm(norm_type)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Give this process's part of the model's state, under the model's names.

        The parts of all processes together are the state of the model,
        in which a tied parameter is in one of them.
        """
        found: dict[str, Tensor] = {}
        for stage in self.stages.values():
            of_others = {
                name for name, p in stage.named_parameters(remove_duplicate=False) if p in self.shared.counted_by_others
            }
            found |= {name: value for name, value in stage.state_dict().items() if name not in of_others}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this process's part of the whole model's ``state``.

        Raises RuntimeError if something of it is missing.
        """
        for stage in self.stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict() if name in state})


def _kind(schedule: str, stages: int, ranks: int) -> ScheduleKind:
    kind = schedule_kind(schedule)
    if ranks == 1 or stages == ranks * kind.stages_per_process:
        return kind
    if (
        stages % ranks == 0
        and kind.stages_per_process > 1
        and not kind.v_shaped
        and ":" not in schedule
        and not kind.only
    ):
        return schedule_kind(f"{schedule}:{stages // ranks}")
    raise PlanError(
        f"{schedule} runs {kind.stages_per_process} stage{'s' * (kind.stages_per_process > 1)} on each of {ranks} processes, and the model "
        f"is cut into {stages}: split it with stages = {ranks * kind.stages_per_process}, or choose another schedule"
    )


def topology_of(
    pipe: SplitModel, schedule: str, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> PipelineTopology:
    """Work out the topology of the pipeline that `Pipe.on` makes.

    Raises PlanError for stages and processes that do not fit.
    """
    if group is None and not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") != "1":
        raise PlanError(
            f"this is one of {os.environ['WORLD_SIZE']} processes that have not met, and each would train alone: call "
            "torch.distributed.init_process_group first"
        )
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        group = dist.group.WORLD
    elif group is not None and dist.get_world_size(group) == 1:
        group = None
    kind = _kind(schedule, len(pipe.stages), dist.get_world_size(group) if group is not None else 1)
    return PipelineTopology(group, len(pipe.stages), kind, device if device is not None else _device(pipe.stages))


def _refuse_empty(stages: Mapping[int, nn.Module]) -> None:
    for number, stage in stages.items():
        empty = next((name for name, p in stage.named_parameters() if p.is_meta), None)
        if empty is not None:
            raise PlanError(
                f"{empty} of stage {number} is on the meta device: give this process's stages their weights first, by "
                "pipe.load(folder, pipe.local_stage_indices(schedule)) or pipe.initialize(pipe.local_stage_indices(schedule))"
            )


def _device(stages: list[Any]) -> torch.device:
    found = next((tensor.device for stage in stages for tensor in stage.parameters() if not tensor.is_meta), None)
    return found if found is not None else torch.device("cpu")


def _names(pipe: SplitModel) -> tuple[str, ...]:
    """Return the first names of the parameters that the model uses."""
    return tuple(sorted(pipe.graph.used))
