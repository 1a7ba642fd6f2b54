"""The strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arclight.federated.strategies.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from arclight.federated.strategies.strategy import Tensors


@dataclass(frozen=True, kw_only=True)
class FedAvg(Strategy):
    """Go to the mean of the clients' weights (McMahan et al. 2017), or ``lr`` of the way."""

    lr: float = 1.0
    """Server rate; 1 goes to the mean."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}")

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors, count: int
    ) -> tuple[torch.Tensor, Tensors]:
        return (weight.to(gradient.dtype) - self.lr * gradient).to(weight.dtype), {}
