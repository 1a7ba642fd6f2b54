"""Reduce the losses of micro-batches to that of their batch.

`PipeRunner` combines losses by a `LossReduction`; `Pipeline` and ``steps`` take the same names of kinds, with their own sums. These names
are arguments of `Pipeline` and `Pipe.on`: they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from arclight.parallel.plan import PlanError

ReductionKind = Literal["token_mean", "micro_mean", "sum"]
REDUCTIONS = ("token_mean", "micro_mean", "sum")


@dataclass(frozen=True)
class LossReduction:
    """The loss of a micro-batch as a sum and a count, and what the sum of sums is multiplied by.

    - ``token_mean``: the sum of all losses over what counts in the whole batch. ``function(output, targets)`` gives ``(sum, count)``, or
      a mean, of which ``weight(targets)`` says how much counts in it; a mean of nothing, which is NaN, adds nothing.
    - ``micro_mean``: the mean of the means of micro-batches, which is that of the batch only where all of them count the same.
    - ``sum``: the sum.
    """

    function: Callable[[Any, Any], Any] | None
    kind: ReductionKind = "token_mean"
    weight: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in REDUCTIONS:
            raise PlanError(f"reduction = {self.kind!r} is not known; choose one of {', '.join(REDUCTIONS)}")
        if self.weight is not None and self.kind != "token_mean":
            raise PlanError(f"a weight is for reduction = 'token_mean', not for {self.kind!r}: leave it out")

    def __call__(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return ``(sum, count)`` of a micro-batch."""
        if self.weight is not None:
            output = _guarded(output, self.weight(targets))
        found = output if self.function is None else self.function(output, targets)
        if isinstance(found, (tuple, list)) and len(found) == 2:
            total, count = found[0], torch.as_tensor(found[1])
            if self.kind == "micro_mean":
                return total / count, torch.ones_like(count)
            return total, count
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise PlanError(
                f"the loss of a micro-batch is a {type(found).__name__}: give loss = a function of the last stage's output and targets that "
                "returns a number, or (sum, count)"
            )
        total = found.reshape(())
        one = torch.ones((), dtype=torch.int64, device=total.device)
        if self.kind != "token_mean":
            return total, one
        if self.weight is None:
            raise PlanError(
                "the loss of a micro-batch is one number, and what it is the mean of is not known: masked positions would count differently "
                "in each. Let it return (sum, count), give weight = a function of the targets, or say reduction = 'micro_mean'"
            )
        count = torch.as_tensor(self.weight(targets), device=total.device)
        return torch.where(count > 0, total * count, 0.0), count

    def counts(self, targets: list[Any]) -> list[float] | None:
        """Return the count of each micro-batch; None if it is known only after forward."""
        if self.kind != "token_mean":
            return [1.0] * len(targets)
        return None if self.weight is None else [float(self.weight(one)) for one in targets]

    def divisor(self, counts: list[float] | None) -> float | None:
        """Return the divisor of the sum over micro-batches; None if it is known only after forward."""
        if self.kind == "sum":
            return 1.0
        return None if counts is None else float(sum(counts))


def _guarded(output: Any, count: Any) -> Any:
    """Return ``output`` with gradients of 0 if ``count`` is 0.

    The gradient of a mean of nothing is NaN.
    """

    def guarded(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        counts = torch.as_tensor(count, device=tensor.device) > 0
        alias = tensor.view_as(tensor)
        alias.register_hook(lambda gradient: torch.where(counts, gradient, 0.0))
        return alias

    return tree_map_only(Tensor, guarded, output)


def no_loss(output: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Give a loss of zero, for runs that want outputs only."""
    return torch.zeros(()), torch.zeros((), dtype=torch.int64)
