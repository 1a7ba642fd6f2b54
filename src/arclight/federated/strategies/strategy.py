"""The server's optimizer: what every strategy can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arclight._intervals import Checked

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Strategy(Checked):
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
