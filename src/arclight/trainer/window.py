"""The accumulation window under way: what a checkpoint between its batches must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from arclight.fabric.spread import is_spread, own_part


@dataclass
class Window:
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
        """Start a window of ``length`` batches, whose losses are scaled in units of ``size`` samples."""
        self.length, self.first_size, self.total = length, size, 0

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """The part of this rank, with its gradients; empty between two windows."""
        if self.count == 0:
            return {}
        gradients = [None if p.grad is None else own_part(p.grad) for p in _parameters(optimizers)]
        return {
            "count": self.count,
            "length": self.length,
            "first_size": self.first_size,
            "total": float(self.total),
            "gradients": gradients,
        }

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Take up a window where it was left."""
        if not state:
            return
        self.count, self.length = state["count"], state["length"]
        self.first_size, self.total = state["first_size"], state["total"]
        for parameter, gradient in zip(_parameters(optimizers), state["gradients"], strict=True):
            parameter.grad = None if gradient is None else _beside(parameter, gradient)


def _parameters(optimizers: Sequence[Optimizer]) -> list[torch.nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _beside(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` spread as its parameter is, in the parameter's own memory layout, which fused optimizers rely on."""
    if not is_spread(parameter):
        return torch.empty_like(parameter).copy_(gradient)
    from arclight.fabric.sharding import from_own_part

    return from_own_part(gradient, parameter)
