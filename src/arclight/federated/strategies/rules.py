"""The strategies that step along the mean change, with or without memory of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arclight._intervals import PositiveFloat, ProperFraction
from arclight.federated.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from arclight.federated.strategies.strategy import Tensors


@dataclass(frozen=True, kw_only=True)
class FedAvg(Strategy):
    """Go to the mean of the clients' weights (McMahan et al. 2017, arXiv 1602.05629), or ``lr`` of the way."""

    lr: PositiveFloat = 1.0
    """Server learning rate; 1 takes the mean."""

    @property
    def goes_to_mean(self) -> bool:
        return self.lr == 1

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        import torch

        moved = self.lr * gradient
        return torch.sub(weight.to(moved.dtype), moved, out=moved).to(weight.dtype), {}


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(FedAvg):
    """The plain averaged step of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706).

    Its clients send the largest few of their changes and keep the rest for later, which stands for the outer momentum: both
    are the ``topk`` codec's and its error feedback's.
    """


@dataclass(frozen=True, kw_only=True)
class FedNesterov(Strategy):
    """Gradient descent with Nesterov's momentum on the pseudo-gradient, as torch's SGD: m <- mu m + g; w <- w - lr (g + mu m)."""

    state_keys: ClassVar[tuple[str, ...]] = ("velocity",)

    lr: PositiveFloat = 1.0
    """Server learning rate."""
    momentum: ProperFraction = 0.9
    """Decay mu of the velocity, in [0, 1)."""

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        from arclight.optim.outer import Outer

        velocity = {"": state["velocity"]} if state else {}
        moved, velocity = Outer(lr=self.lr, momentum=self.momentum).step({"": weight}, {"": gradient}, velocity)
        return moved[""], {"velocity": velocity[""] if velocity else gradient}


@dataclass(frozen=True, kw_only=True)
class DiLoCo(FedNesterov):
    """The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105): Nesterov's momentum with its paper's values."""

    lr: PositiveFloat = 0.7
    """Server learning rate."""
    momentum: ProperFraction = 0.9
    """Decay of the velocity, in [0, 1); short runs do better with 0.6."""


@dataclass(frozen=True, kw_only=True)
class FedMomentum(Strategy):
    """FedMom (Huo et al. 2020, arXiv 2002.02090): v' <- w - lr g; w' <- v' + mu (v' - v), where v begins as w."""

    state_keys: ClassVar[tuple[str, ...]] = ("stepped",)

    lr: PositiveFloat = 1.0
    """Server learning rate."""
    momentum: ProperFraction = 0.9
    """How far to go on beyond a step, in [0, 1)."""

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        wide = weight.to(gradient.dtype)
        stepped = wide - self.lr * gradient
        before = state["stepped"] if state else wide
        return stepped.add(stepped - before, alpha=self.momentum).to(weight.dtype), {"stepped": stepped}
