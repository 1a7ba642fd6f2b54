"""Describe the tensors sent between stages: shapes, dtypes, and which receive gradients.

When a shape of micro-batches first comes, `engine` sends a stage's `TensorSpec` list to the next stage as JSON (`TensorSpec.plain`), so that it
can allocate; `stage` checks each micro-batch against it. Only ranks of one run read it: its form is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that one stage gives to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    returns: bool = True
    """Whether a gradient comes back for it: it requires one, and the loss depends on it."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.requires_grad)

    def plain(self) -> list[Any]:
        """Return it as plain values for JSON; :meth:`of_plain` is the inverse."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.requires_grad, self.returns]

    @classmethod
    def of_plain(cls, values: list[Any]) -> TensorSpec:
        shape, dtype, requires_grad, returns = values
        return cls(tuple(shape), getattr(torch, dtype), requires_grad, returns)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Boundary = tuple[TensorSpec, ...]
"""Tensors that one stage sends to the next for one micro-batch."""


def check_given(output: tuple[Tensor, ...], boundary: Boundary, backward: bool) -> None:
    """Raise ValueError if a stage's output differs from the first micro-batch's of this shape."""
    for tensor, shape in zip(output, boundary, strict=True):
        asks = backward and tensor.requires_grad and not shape.requires_grad
        if asks or tensor.shape != shape.shape or tensor.dtype != shape.dtype:
            found = f"{tuple(tensor.shape)}, {tensor.dtype}" + (" and requires a gradient" if asks else "")
            raise ValueError(
                f"a value for the next stage is {found}, but was {shape.shape}, {shape.dtype} for the first micro-batch of this shape: "
                "what crosses a cut must follow from the shapes of the input alone"
            )


def check_returned(gradients: list[Tensor | None], boundary: Boundary) -> None:
    """Raise ValueError if a stage has a gradient that the stage before does not wait for."""
    if any(grad is not None and not shape.returns for grad, shape in zip(gradients, boundary, strict=True)):
        raise ValueError(
            "the loss depends on a value from the stage before, on which that of the first micro-batch did not depend: what a gradient "
            "flows through must not change with the data; multiply by 0 what is switched off"
        )
