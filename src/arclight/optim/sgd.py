"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.sgd import sgd

from arclight.fabric.spread import own_part, own_parts
from arclight.optim.memory import aligned_gradients

if TYPE_CHECKING:
    from arclight.optim.optimizer import Owned


class SGDRule:
    """torch's fused step, on each process's part of the tensors."""

    def new_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        parameters = own_parts(parameter for _, parameter, _ in own)
        velocities = [own_part(state["momentum_buffer"]) if state else None for _, _, state in own]
        sgd(
            parameters, aligned_gradients(own), velocities, fused=True, weight_decay=group["weight_decay"],
            momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=group["nesterov"], maximize=False,
            found_inf=None if skip is None else skip.float(),
        )  # fmt: skip
