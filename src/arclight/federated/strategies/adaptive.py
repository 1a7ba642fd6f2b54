"""Strategies with a rate for each weight, from the sizes of its earlier changes (Reddi et al. 2020, arXiv 2003.00295, algorithm 2).

In the paper's terms the mean change is D = mean(local) - w = -gradient; here the signs are those of the gradient.
"""

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
class _Adaptive(Strategy):
    """m <- b1 m + (1 - b1) g; v <- as the class says; w <- w - lr m / (sqrt(v) + tau)."""

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: PositiveFloat = 0.1
    """Server learning rate, about the size of a weight's step."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decays b1 and b2 of the mean change and of its square, each in [0, 1)."""
    tau: PositiveFloat = 1e-9
    """Added to the root of the squares: weights whose changes are smaller move less."""
    bias_correction: bool = False
    """Divide by what the means' zero start has left out, as Adam does; the paper does not, and starts the squares at tau^2."""

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        import torch

        (first, second), t = self.betas, count + 1
        square = gradient.square()
        if state:
            mean, squares = state["exp_avg"].to(gradient.dtype), state["exp_avg_sq"].to(gradient.dtype)
        else:
            mean = torch.zeros_like(gradient)
            squares = torch.full_like(gradient, 0.0 if self.bias_correction else self.tau**2)
        mean = torch.lerp(mean, gradient, 1 - first)
        squares = self._squares(squares, square, 1 - second)
        correct = 1 - first**t if self.bias_correction else 1.0
        root = (squares / (1 - second**t)).sqrt_() if self.bias_correction else squares.sqrt()
        moved = weight.to(gradient.dtype) - (self.lr / correct) * mean / root.add_(self.tau)
        return moved.to(weight.dtype), {"exp_avg": mean, "exp_avg_sq": squares}

    def _squares(self, squares: torch.Tensor, square: torch.Tensor, share: float) -> torch.Tensor:
        raise TypeError(f"{type(self).__name__} is no strategy of its own")


@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """Adam on the pseudo-gradient: v <- b2 v + (1 - b2) g^2."""

    def _squares(self, squares: torch.Tensor, square: torch.Tensor, share: float) -> torch.Tensor:
        return squares.lerp(square, share)


@dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    """Yogi on the pseudo-gradient: v <- v - (1 - b2) g^2 sign(v - g^2), so that v never falls faster than g^2 says."""

    def _squares(self, squares: torch.Tensor, square: torch.Tensor, share: float) -> torch.Tensor:
        return squares - share * square * (squares - square).sign()
