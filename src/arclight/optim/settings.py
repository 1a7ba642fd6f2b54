"""Settings of optimizers and learning-rate schedules (no torch here: a recipe is read without it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    lr: float = 0.01
    """Peak learning rate."""
    momentum: float = 0.937
    """Velocity decay, in [0, 1)."""
    nesterov: bool = True
    """Look ahead along the velocity."""
    weight_decay: float = 5e-4
    """L2 penalty on weight matrices and kernels; biases and normalisation are never decayed."""

    def build(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        from arclight.optim.groups import decay_groups, make_optimizer

        return make_optimizer(
            "SGD",
            decay_groups(parameters, self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
        )


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay of weight matrices and kernels; biases and normalisation are never decayed."""

    def build(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        from arclight.optim.groups import decay_groups, make_optimizer

        return make_optimizer(
            "AdamW", decay_groups(parameters, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps
        )


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine down to ``final`` times the peak."""

    warmup: float = 0.05
    """Warm-up as a share of all steps, in [0, 1)."""
    final: float = 0.01
    """Last learning rate as a share of the peak."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        from arclight.optim.schedules import cosine, lambda_schedule

        return lambda_schedule(optimizer, cosine, total_steps=total_steps, warmup=self.warmup, final=self.final)


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, decay: linear up, constant, then linear down to ``final`` times the peak (Hu et al. 2024)."""

    warmup: float = 0.05
    """Warm-up as a share of all steps, in [0, 1)."""
    decay: float = 0.2
    """Decay phase as a share of all steps, in [0, 1]."""
    final: float = 0.0
    """Last learning rate as a share of the peak."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        from arclight.optim.schedules import lambda_schedule, wsd

        return lambda_schedule(
            optimizer, wsd, total_steps=total_steps, warmup=self.warmup, decay=self.decay, final=self.final
        )


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warm-up, then constant."""

    warmup: float = 0.0
    """Warm-up as a share of all steps, in [0, 1)."""

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        from arclight.optim.schedules import constant, lambda_schedule

        return lambda_schedule(optimizer, constant, total_steps=total_steps, warmup=self.warmup)
