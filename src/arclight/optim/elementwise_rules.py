"""Define the elementwise rules of `optimizer`: AdamW, and SGD with momentum.

`MixedOptimizer` calls ``new_state`` and ``step`` (protocol `Rule` of `optimizer`); `adopt` takes `decay_of` and `is_bfloat16`. State keys are
those of torch's AdamW and SGD and stay: they are in checkpoints, and states of torch's optimizers load into these rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from arclight.fabric.distributed.dtensor import local_tensor, local_tensors
from arclight.optim.stochastic_rounding import DTYPES, Owned, aligned_gradients, draws, round_stochastically, store


class AdamWRule:
    """Update by Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Each rank updates its own shards. Moments are float32 or bfloat16 (``state_dtype``) for weights of these dtypes, else of the weight's
    dtype. If they have the parameter's dtype and nothing is rounded stochastically this is torch's fused step; else the step is computed
    in float32 here. ``step`` counts in float32 on the device, as torch's fused step does.
    """

    def new_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        dtype = DTYPES[group["state_dtype"]]
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            dtype = parameter.dtype  # float64 keeps its precision in the moments
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
        }

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        random = group["stochastic_rounding"]
        fused = [o for o in own if o[1].dtype == o[2]["exp_avg"].dtype and not (random and is_bfloat16(o[1]))]
        if fused:
            self._fused(fused, group, skip)
        names = {name for name, _, _ in fused}
        for name, parameter, state in own:
            if name not in names:
                _step_in_float32(name, parameter, state, group, skip)

    def _fused(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        states = [state for _, _, state in own]
        adamw(
            local_tensors(parameter for _, parameter, _ in own), aligned_gradients(own),
            local_tensors(state["exp_avg"] for state in states), local_tensors(state["exp_avg_sq"] for state in states), [],
            [state["step"] for state in states], fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
            lr=group["lr"], weight_decay=decay_of(group), eps=group["eps"], maximize=False,
            found_inf=None if skip is None else skip.float(),
        )  # fmt: skip


def is_bfloat16(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def decay_of(group: Mapping[str, Any]) -> Any:
    """Return the factor that, times the rate, is the decay of one step.

    It is ``weight_decay``; under ``decay_scale="lr/peak"`` ``weight_decay`` divided by the peak rate (unless that is 0).
    """
    decay, peak = group["weight_decay"], group.get("initial_lr", group["lr"])
    if group.get("decay_scale", "lr") == "lr" or not decay or (not isinstance(peak, torch.Tensor) and not peak):
        return decay
    return decay / peak


def _step_in_float32(
    name: str,
    parameter: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: Mapping[str, Any],
    skip: torch.Tensor | None,
) -> None:
    """Compute one AdamW step in float32, without synchronising with the device."""
    assert parameter.grad is not None
    (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"]
    step += 1 if skip is None else ~skip
    part, gradient = local_tensor(parameter), local_tensor(parameter.grad).float()
    mean = local_tensor(state["exp_avg"]).float().lerp(gradient, 1 - beta1)
    square = (local_tensor(state["exp_avg_sq"]).float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    bias1, bias2 = (-torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step) for beta in (beta1, beta2))
    update = (mean / bias1).div_((square / bias2).sqrt_().add_(group["eps"]))
    new = part.float() * (1 - lr * decay_of(group)) - update * lr
    targets = (("weight", part, new), ("exp_avg", local_tensor(state["exp_avg"]), mean))
    draw = draws(parameter) if group["stochastic_rounding"] else None
    for kind, target, value in (*targets, ("exp_avg_sq", local_tensor(state["exp_avg_sq"]), square)):
        if draw is not None and is_bfloat16(target):
            value = round_stochastically(value, draw, step, group["seed"], f"{name}/{kind}")
        store(target, value, skip)


class SGDRule:
    """Update by torch's fused SGD with momentum; each rank updates its own shards."""

    def new_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        parameters = local_tensors(parameter for _, parameter, _ in own)
        velocities = [local_tensor(state["momentum_buffer"]) if state else None for _, _, state in own]
        sgd(
            parameters, aligned_gradients(own), velocities, fused=True, weight_decay=group["weight_decay"],
            momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=group["nesterov"], maximize=False,
            found_inf=None if skip is None else skip.float(),
        )  # fmt: skip
