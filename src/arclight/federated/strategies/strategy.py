"""The server's optimizer: what every strategy can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the mean of the clients' changes moves the server's weights, tensor by tensor. Pure: nothing given is changed."""

    state_keys: ClassVar[tuple[str, ...]] = ()
    """Tensors that are kept for each weight from round to round, of its shape and in float32 (float64 for float64 weights)."""

    elementwise: ClassVar[bool] = True
    """Whether an element's step depends on nothing but this element's values, so that a tensor may be stepped in parts."""

    @property
    def goes_to_mean(self) -> bool:
        """Whether the new weight is the mean of the clients' weights, which is then taken as it is where weights are sent."""
        return False

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], count: int
    ) -> tuple[torch.Tensor, Tensors]:
        """New weight (of the weight's type) and new state.

        gradient: the pseudo-gradient, weights before minus the mean of weights after, float32 or wider, same shape.
        state: tensors by `state_keys`, empty before the tensor's first step. count: steps of this tensor before this one.
        """
        raise TypeError(f"{type(self).__name__} is no strategy of its own: it has no step")


def check_rate(lr: float) -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr must be positive, got {lr}")


def check_decay(**decays: float) -> None:
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
