"""Accumulate gradients: weigh micro-batches within an accumulation window and across ranks.

`step` asks it for each batch whether a window begins or ends; `RunState` keeps the state, whose keys are in checkpoints. The gradient
must be the mean over all samples of a window (or what ``batch_weight`` counts), whatever the sizes of its batches; with ``weigh_windows``
off (Lightning) each batch counts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor, local_tensors
from arclight.trainer.loop.gradients import parameters_of

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


@dataclass
class AccumulationState:
    """Batches whose gradients wait for an optimizer step."""

    count: int = 0
    """Batches so far; 0 between two windows."""
    length: int = 1
    """Batches that the window was begun for."""
    first_size: Any = 0
    """Samples of the window's first batch, the unit that the losses are scaled in."""
    total: Any = 0
    """Samples (or what the module counts) so far on this rank, without those of skipped batches."""

    def begin(self, length: int, size: Any) -> None:
        """Start a window of ``length`` batches with losses in units of ``size`` samples."""
        self.length, self.first_size, self.total = length, size, 0

    def has_loss(self) -> bool:
        """Return True if a batch so far had a loss."""
        return bool(self.total)

    def clear(self) -> None:
        """Discard the window under way; the next batch starts a new one."""
        self.count = 0

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the part of this rank, with its gradients; empty between two windows."""
        if self.count == 0:
            return {}
        gradients = [None if p.grad is None else local_tensor(p.grad) for p in _parameters(optimizers)]
        return {
            "count": self.count,
            "length": self.length,
            "first_size": self.first_size,
            "total": float(self.total),
            "gradients": gradients,
        }

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Restore a window."""
        if not state:
            return
        self.count, self.length = state["count"], state["length"]
        self.first_size, self.total = state["first_size"], state["total"]
        for parameter, gradient in zip(_parameters(optimizers), state["gradients"], strict=True):
            parameter.grad = None if gradient is None else _shard_like_parameter(parameter, gradient)


def _parameters(optimizers: Sequence[Optimizer]) -> list[torch.nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _shard_like_parameter(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Shard ``gradient`` as its parameter is, in the parameter's memory layout.

    Fused optimizers rely on that layout.
    """
    if not is_dtensor(parameter):
        return torch.empty_like(parameter).copy_(gradient)
    from arclight.fabric.distributed.sharding import from_local_tensor

    return from_local_tensor(gradient, parameter)


BatchWeight = Callable[[Any], Any]
"""Returns what the loss of a batch is a mean over (`Module.batch_weight`)."""
EPS = 1e-20
"""Least total to divide by: a total of 0 has gradients of 0, which stay 0."""


class GradientAccumulator:
    """Decide when accumulation windows begin and end, and how their batches count.

    The gradient is the mean over the window's samples (or over what the module counts, `Module.batch_weight`), not a mean
    of means: each loss counts with its batch's weight, so a smaller last batch and a shorter last window come out right; batches
    of other ranks may differ in weight too, so several processes agree on a window's total, once for each.

    ``batch_weight``: the module's own, if it has one; ``length``: gives the batches of a window that begins now; ``batch_size``: the samples
    of the batch under way; ``ends``: tells if that batch ends an epoch that closes its window; ``weigh_windows``: batches
    count by their samples; else, without a ``batch_weight``, alike.
    """

    def __init__(
        self, window: AccumulationState, strategy: Strategy, optimizer: Optimizer, batch_weight: BatchWeight | None, *,
        length: Callable[[], int], batch_size: Callable[[], int], ends: Callable[[], bool], weigh_windows: bool,
    ) -> None:  # fmt: skip
        self.window, self.strategy, self.optimizer = window, strategy, optimizer
        self._length, self._batch_size, self._ends = length, batch_size, ends
        several_batches = length() > 1 or window.count > 0
        self.several = strategy.world_size > 1
        self.counts = batch_weight
        self.weigh = (weigh_windows and several_batches) or self.counts is not None
        self.exchanged = self.several or self.counts is not None
        """Whether a window's total is only known at its end; losses then carry their weight as it is."""

    def take(self, batch: Any) -> tuple[Any, bool, bool]:
        """Add a batch to the window.

        Returns the factor of its loss, and True if it is the window's first, and its last.
        """
        window = self.window
        if self.counts is not None:
            size = self.counts(batch)
        else:
            size = self._batch_size() if self.weigh else 1
        first = window.count == 0
        if first:
            window.begin(self._length(), 1 if self.exchanged or not self.weigh else max(1, size))
        window.count += 1
        last = window.count >= window.length or self._ends()
        self.size = size
        return size / window.first_size / window.length, first, last

    def end(self) -> bool:
        """Close the window and make its gradients a mean; False if all its batches were skipped."""
        window, samples = self.window, self.window.total
        window.clear()
        gradients = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
        if not gradients:
            return False
        if not self.weigh:
            return True
        if self.exchanged:  # on the device: nothing here waits for it
            total = torch.as_tensor(samples, dtype=_weight_dtype(gradients[:1]), device=gradients[0].device)
            total = self.strategy.all_reduce(total, self.strategy.step_group) if self.several else total
            torch._foreach_mul_(local_tensors(gradients), window.length / total.clamp(min=EPS))
        elif samples != window.first_size * window.length:  # shorter, or uneven batches
            torch._foreach_mul_(gradients, window.first_size * window.length / samples)
        return True


def weigh_across_ranks(
    strategy: Strategy,
    batch_weight: BatchWeight,
    parameters: Iterable[torch.nn.Parameter],
    forward: Callable[[Any, int], Any],
    backward: Callable[[torch.Tensor], Any],
) -> tuple[Callable[[Any, int], Any], Callable[[torch.Tensor], Any]]:
    """Weight each rank's loss by its batch's count, for updates of one batch.

    ``parameters``: all of the module's, whose types decide that of the weights.

    The gradients averaged over ranks are then those of the mean over all that their batches count.
    """
    share = torch.tensor(1.0)
    dtype = _weight_dtype(parameters)

    def step(batch: Any, index: int) -> Any:
        nonlocal share
        weight = torch.as_tensor(batch_weight(batch), dtype=dtype, device=strategy.root_device)
        share = weight / strategy.all_reduce(weight, strategy.step_group).clamp(min=EPS)
        return forward(batch, index)

    return step, lambda loss: backward(loss * share)


def _weight_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Choose the type of weights for gradients or losses of ``tensors``."""
    double = (torch.float64, torch.complex128)
    return torch.float64 if any(tensor.dtype in double for tensor in tensors) else torch.float32
