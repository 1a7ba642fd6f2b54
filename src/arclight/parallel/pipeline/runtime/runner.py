"""Run a step's micro-batches through the engine.

`install` and `parallelize_steps` make a `StepRunner` for a module under a Trainer; `PipeRunner`, for users without one, shares
`forward_only` and `forward_backward`. They differ in who scales the gradients: a `StepRunner` returns a loss whose backward scales them, a
`PipeRunner` does so itself. Loss and gradients must be those of one process, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arclight.fabric.distributed.dtensor import local_tensors
from arclight.fabric.distributed.sharding import scale_tensors
from arclight.parallel.layers.context_parallel import over_sequences, shard_arguments
from arclight.parallel.pipeline.runtime.batch_splitting import split_arguments
from arclight.parallel.pipeline.runtime.consistency_check import DisagreementError
from arclight.parallel.pipeline.runtime.engine import Engine
from arclight.parallel.pipeline.runtime.tied_parameters import TiedParameters
from arclight.parallel.step_protocol import Runnable, Split, check_samples, own_batch_weight, with_positions


@dataclass(frozen=True)
class StepWeights:
    """Functions of a module for one batch: its count, and the scaling of its own losses."""

    count: Callable[[], Any] | None = None
    """Returns the batch's count, by which losses of ranks with the same layers are weighted; None: all alike."""
    scale_losses: Callable[[Tensor], Any] | None = None
    """Takes the factor of loss sums before their backward, for a module that adds losses of its own there."""

    @classmethod
    def of(cls, module: Any, batch: Any) -> StepWeights:
        count, scale = own_batch_weight(module), getattr(module, "scale_losses", None)
        return cls(
            None if count is None else partial(count, batch),
            None if scale is None else lambda share: scale(share, batch),
        )


def forward_only(engine: Engine, micro_batches: list[Split]) -> tuple[Tensor, Tensor]:
    """Run forwards; returns the sums of losses and counts, on every process of the pipeline."""
    engine.run(micro_batches, backward=False)
    return engine.totals()


def forward_backward(
    engine: Engine, micro_batches: list[Split], loss_scale: Tensor | float, shared: TiedParameters | None
) -> tuple[StepGradients, Tensor, Tensor]:  # fmt: skip
    """Run forwards and backwards of losses times ``loss_scale``.

    Returns the step's gradients and the sums of losses and counts.

    The gradients are detached from the parameters, which have those of steps before, also if the run fails. Those of parameters of
    several stages are sums over these.
    """
    for part in engine.parts.values():
        part.loss_scale = loss_scale
    gradients = StepGradients([p for p in engine.parameters if p.requires_grad])
    try:
        engine.run(micro_batches, backward=True)
    finally:
        gradients.detach()
    if shared is not None:
        shared.sum(gradients.new)
    return gradients, *engine.totals()


class StepRunner:
    """Run the steps of a module whose model is cut into stages; see `step_protocol`.

    A batch is cut along its samples into ``micro_batches`` parts, or fewer if it has fewer samples; parts may differ in size.
    With gradients switched off it is evaluated, by forwards only. The loss and its count are the same on all processes of the
    pipeline. cp: the mesh over which sequences are cut. data: the group of processes that see other tokens with the same layers, over
    which FSDP averages gradients within the schedule; None if there are none. shared: parameters of several stages.
    """

    def __init__(
        self, engine: Engine, micro_batches: int, cp: Any = None, data: dist.ProcessGroup | None = None,
        shared: TiedParameters | None = None, in_step: bool = False,
    ) -> None:  # fmt: skip
        """Prepare steps of ``engine``.

        in_step: whether processes of ``data`` exchange something within each micro-batch, so that all need as many.
        """
        self.in_step = in_step
        self.mismatch = ScaleMismatch()
        self.engine, self.topology = engine, engine.topology
        self.micro_batches, self.cp, self.data, self.shared = micro_batches, cp, data, shared

    def __call__(self, module: Runnable, batch: Any) -> tuple[Tensor, Tensor]:
        split = with_positions(module.split_batch(batch))
        if self.cp is not None:
            split = shard_arguments(split, self.cp)
        check_samples(split)
        micro_batches, _ = split_arguments(split, self.micro_batches)
        return self.run(micro_batches, StepWeights.of(module, batch))

    def run(self, micro_batches: list[Split], weights: StepWeights) -> tuple[Tensor, Tensor]:
        """Run a batch that is cut into ``micro_batches`` already; gives loss and count of the whole."""
        self.mismatch.raise_if_found()
        if self.in_step:
            self._check_number(len(micro_batches))
        if not torch.is_grad_enabled():
            return self._over_sequences(*forward_only(self.engine, micro_batches))
        share = self._share(weights)
        if weights.scale_losses is not None:
            weights.scale_losses(share)
        gradients, total, count = forward_backward(self.engine, micro_batches, share, self.shared)
        total, count = self._over_sequences(total, count)
        factor = (self.cp.size() if self.cp is not None else 1) / share
        start = torch.zeros((), device=self.topology.device, requires_grad=True)
        return _ComputedLoss.apply(start, total, gradients, factor, self.data, self.mismatch), count

    def _check_number(self, micro_batches: int) -> None:
        """Raise DisagreementError on all processes if numbers of micro-batches differ in ``data``."""
        self.engine.wait()  # to read the numbers would do so too, and name nobody
        both = torch.tensor([micro_batches, -micro_batches], device=self.topology.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.data)
        most, least = both.tolist()
        if most != -least:
            raise DisagreementError(
                f"data-parallel processes were given batches of {-least} and of {most} micro-batches, which wait for one another in each "
                "(ep > 1, or reshard_after_forward = always): give all of them the same number of samples (drop_last=True)"
            )

    def _share(self, weights: StepWeights) -> Tensor:
        """Return 1 / the mean over processes of what their batches count, if the module says it.

        Gradients then have their final size from the start, which keeps half-precision types from overflowing. The same on all
        processes that have the same layers.
        """
        weight = torch.ones((), dtype=torch.float64, device=self.topology.device)
        if weights.count is not None:
            weight = torch.as_tensor(weights.count(), device=self.topology.device).double()
        if self.data is not None:
            dist.all_reduce(weight, group=self.data)
            weight /= dist.get_world_size(self.data)
        return torch.where(weight > 0, weight, 1.0).reciprocal()

    def _over_sequences(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss and count of the whole batch from those of this part of its sequences."""
        return (total, count.long()) if self.cp is None else over_sequences(total, count.long(), self.cp)


class StepGradients:
    """Separate the gradients of one step from those that parameters have from steps before."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.new: dict[nn.Parameter, Tensor | None] = {}

    def detach(self) -> StepGradients:
        """Detach the step's gradients from the parameters, which have those from before again."""
        self.new = {parameter: parameter.grad for parameter in self.parameters}
        for parameter, gradient in zip(self.parameters, self.before, strict=True):
            parameter.grad = gradient
        self.before = []
        return self

    def restore(self, scale: Tensor | float) -> None:
        """Restore them: add them, multiplied by ``scale``, to what the parameters have."""
        pairs = [(parameter, new) for parameter, new in self.new.items() if new is not None]
        self.new = {}
        if not pairs:
            return
        if not (isinstance(scale, float) and scale == 1.0):
            scale_tensors(local_tensors([new for _, new in pairs]), scale)
        sums = [(p.grad, new) for p, new in pairs if p.grad is not None]
        if sums:
            torch._foreach_add_(local_tensors([old for old, _ in sums]), local_tensors([new for _, new in sums]))
        for parameter, new in pairs:
            if parameter.grad is None:
                parameter.grad = new


class ScaleMismatch:
    """Find data-parallel processes that scale the gradients of their pipelines differently.

    On a CPU at once. On a device, which nobody waits for here, such gradients are NaN, and the next step says why.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Any]] = []

    def checked(self, scale: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the scale of all processes of ``group``."""
        both = torch.stack((scale, -scale))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        largest, least = both[0], -both[1]
        unlike = ~(largest - least <= 1e-4 * torch.maximum(largest.abs(), least.abs()))
        if not unlike.is_cuda:
            self.note(unlike, None)
        else:
            copied = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(unlike, non_blocking=True)
            self.note(copied, torch.cuda.current_stream(unlike.device).record_event())
        return largest.masked_fill(unlike, torch.nan)

    def note(self, unlike: Tensor, event: Any) -> None:
        """Look at ``unlike``, on the host, once ``event`` (None: now) has happened."""
        self._noted.append((unlike, event))
        if event is None:
            self.raise_if_found()

    def raise_if_found(self) -> None:
        """Raise RuntimeError if scales differed between ranks, as far as is known by now."""
        while self._noted and (self._noted[0][1] is None or self._noted[0][1].query()):
            if bool(self._noted.pop(0)[0]):
                raise RuntimeError(
                    "data-parallel processes scale the gradients of their pipelines differently: give the module a batch_weight, so "
                    "that losses count by what they are the mean of"
                )


class _ComputedLoss(torch.autograd.Function):
    """A loss whose gradients are there before its backward, which scales them."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, total: Tensor, gradients: StepGradients, factor: Tensor, data: dist.ProcessGroup | None,
        unlike: ScaleMismatch,
    ) -> Tensor:  # fmt: skip
        ctx.gradients, ctx.factor, ctx.data, ctx.mismatch = gradients, factor, data, unlike
        return total.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, ...]:
        if ctx.data is not None:  # FSDP has averaged over processes already: that is right if all of them scale alike
            scale = ctx.mismatch.checked(scale, ctx.data)
        ctx.gradients.restore(scale * ctx.factor)
        return None, None, None, None, None, None
