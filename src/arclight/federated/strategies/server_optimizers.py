"""Define server optimizers (FedAvg, FedAdam, ...), which step by the mean update.

A federation's ``strategy`` is one of these; `strategy_step` calls it chunk by chunk, or with whole tensors if not `Strategy.elementwise`. torch
is imported by a step only. Names of classes and fields are recipe keys, names of classes and states are in round checkpoints: all stay. A
new one also goes into `Strategies` (``strategies/__init__``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arclight._intervals import Checked, PositiveFloat, ProperFraction

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Strategy(Checked):
    """Server optimizer: moves weights by the clients' mean change, tensor by tensor.

    Pure: inputs are not changed.
    """

    state_keys: ClassVar[tuple[str, ...]] = ()
    """Tensors that are kept for each weight from round to round, of its shape and in float32 (float64 for float64 weights)."""

    elementwise: ClassVar[bool] = True
    """Whether an element's step depends on nothing but this element's values, so that a tensor may be stepped in parts."""

    @property
    def goes_to_mean(self) -> bool:
        """True if the new weight is exactly the clients' mean."""
        return False

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        """Return the new weight (of the weight's type) and the new state.

        gradient: the pseudo-gradient, weights before minus the mean of weights after, float32 or wider, same shape.
        state: tensors by `state_keys`, empty before the tensor's first step. count: steps of this tensor before this one.
        """
        raise TypeError(f"{type(self).__name__} is an abstract strategy without a step: use a subclass of it")


@dataclass(frozen=True, kw_only=True)
class FedAvg(Strategy):
    """Step to the clients' mean weights, or by the share ``lr`` (McMahan et al. 2017).

    arXiv 1602.05629.
    """

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
    """SGD with Nesterov momentum on the pseudo-gradient, as torch's.

    m <- mu m + g; w <- w - lr (g + mu m).
    """

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
    """DiLoCo's outer optimizer: Nesterov momentum with its paper's values.

    Douillard et al. 2023, arXiv 2311.08105.
    """

    lr: PositiveFloat = 0.7
    """Server learning rate."""
    momentum: ProperFraction = 0.9
    """Decay of the velocity, in [0, 1); short runs do better with 0.6."""


@dataclass(frozen=True, kw_only=True)
class FedMomentum(Strategy):
    """FedMom (Huo et al. 2020, arXiv 2002.02090): server momentum.

    v' <- w - lr g; w' <- v' + mu (v' - v), where v begins as w.
    """

    state_keys: ClassVar[tuple[str, ...]] = ("stepped",)

    lr: PositiveFloat = 1.0
    """Server learning rate."""
    momentum: ProperFraction = 0.9
    """Server momentum mu, in [0, 1)."""

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        wide = weight.to(gradient.dtype)
        stepped = wide - self.lr * gradient
        before = state["stepped"] if state else wide
        return stepped.add(stepped - before, alpha=self.momentum).to(weight.dtype), {"stepped": stepped}


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Strategy):
    """Base of adaptive server optimizers: m <- b1 m + (1 - b1) g; v by the class.

    w <- w - lr m / (sqrt(v) + tau).
    """

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: PositiveFloat = 0.1
    """Server learning rate, about the magnitude of a weight's update."""
    betas: tuple[ProperFraction, ProperFraction] = (0.9, 0.999)
    """Decay rates b1 and b2 of the first and second moment, each in [0, 1)."""
    tau: PositiveFloat = 1e-9
    """Adaptivity, added to the root of the second moment: weights with smaller updates move less."""
    bias_correction: bool = False
    """Correct the bias of moments that start at zero, as Adam does; the paper does not, and starts the second moment at tau^2."""

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
        raise TypeError(f"{type(self).__name__} is an abstract strategy: use a subclass of it")


@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """Adam on the pseudo-gradient: v <- b2 v + (1 - b2) g^2."""

    def _squares(self, squares: torch.Tensor, square: torch.Tensor, share: float) -> torch.Tensor:
        return squares.lerp(square, share)


@dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    """Yogi on the pseudo-gradient: v <- v - (1 - b2) g^2 sign(v - g^2).

    So v never falls faster than g^2 says.
    """

    def _squares(self, squares: torch.Tensor, square: torch.Tensor, share: float) -> torch.Tensor:
        return squares - share * square * (squares - square).sign()
