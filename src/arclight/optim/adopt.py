"""Define the rule ADOPT of `optimizer`, and its quasi-hyperbolic form (QHADOPT).

ADOPT: Taniguchi et al. 2024, arXiv 2411.02853. `MixedOptimizer` calls ``new_state`` and ``step`` for groups of kind ``adopt`` or
``qhadopt``. Keys of the state are in checkpoints and stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arclight.fabric.distributed.dtensor import local_tensor
from arclight.optim.elementwise_rules import decay_of, is_bfloat16
from arclight.optim.stochastic_rounding import DTYPES, Owned, aligned_gradients, draws, round_stochastically, store

_CACHED_ELEMENTS = 1 << 18
"""Elements of a tensor that a CPU updates at a time: weight, gradient, moments and one temporary fit into its cache."""


class AdoptRule:
    """Update by Adam with gradients normalised by earlier steps' second moment, and clipped.

    At step t = 0, 1, ... with gradient g: n = clip(g / max(sqrt(v), eps), t^(1/4)); m = beta1 m + (1 - beta1) n;
    w -= lr (d w + (1 - v1) n + v1 m), where ADOPT is v1 = 1; v = beta2 v + (1 - beta2) g^2. At t = 0, v becomes g^2 and weights stay. d
    is the decoupled weight decay, see `decay_of`.

    Each rank updates its own shards, in float32 (float64 for float64 weights) whatever is stored. ``step`` is a CPU tensor until `skip`
    (a boolean tensor on the device) is passed; from then on it lives on the device, so that skipping needs no host synchronisation.
    """

    def new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        dtype = DTYPES[group["state_dtype"]]
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            dtype = parameter.dtype
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
        }

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: Tensor | None) -> None:
        counts = [_count(state, skip) for _, _, state in own]
        stored = [
            (local_tensor(parameter), local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"]))
            for _, parameter, state in own
        ]
        in_place = [skip is None and all(x.dtype == _wide(tensors[0]) for x in tensors) for tensors in stored]
        computed = [
            tensors if kept else tuple(x.to(_wide(tensors[0]), copy=True) for x in tensors)
            for tensors, kept in zip(stored, in_place, strict=True)
        ]
        gradients = [g.to(_wide(g)) for g in aligned_gradients(own)]
        _update([tensors[0] for tensors in computed], gradients, [tensors[1] for tensors in computed],
                [tensors[2] for tensors in computed], counts, group)  # fmt: skip
        for (name, parameter, state), targets, values, done in zip(own, stored, computed, in_place, strict=True):
            if not done:
                _store(name, parameter, state["step"], targets, values, group, skip)
            state["step"] += 1 if skip is None else (~skip).to(state["step"].device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _count(state: dict[str, Tensor], skip: Tensor | None) -> float | Tensor:
    """Return the number of earlier steps."""
    if skip is not None:
        state["step"] = state["step"].to(skip.device)
    step = state["step"]
    if step.device.type == "cpu":
        return float(step)
    return step.double() if step.device.type == "cuda" else step


def _store(
    name: str, parameter: Tensor, step: Tensor, targets: Sequence[Tensor], values: Sequence[Tensor], group: Mapping[str, Any],
    skip: Tensor | None,
) -> None:  # fmt: skip
    """Store computed weights and moments in their own precision."""
    draw = draws(parameter) if group["stochastic_rounding"] and any(is_bfloat16(x) for x in targets) else None
    for kind, target, value in zip(("weight", "exp_avg", "exp_avg_sq"), targets, values, strict=True):
        if draw is not None and is_bfloat16(target):
            value = round_stochastically(value, draw, step.to(target.device) + 1, group["seed"], f"{name}/{kind}")
        store(target, value, skip)


def _update(
    weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor], counts: list[Any],
    group: Mapping[str, Any],
) -> None:  # fmt: skip
    """Update lists of tensors in place."""
    if weights[0].device.type != "cpu":
        _foreach_update(weights, gradients, means, squares, counts, group)
        return
    for *tensors, count in zip(weights, gradients, means, squares, counts, strict=True):
        flat = all(x.is_contiguous() for x in tensors)
        parts = [x.view(-1).split(_CACHED_ELEMENTS) if flat else (x,) for x in tensors]
        for weight, gradient, mean, square in zip(*parts, strict=True):
            _update_part(weight, gradient, mean, square, count, group)


def _update_part(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: float, group: Mapping[str, Any]
) -> None:
    """Update one tensor on a CPU as :func:`_foreach_update` does, in fewer passes."""
    (beta1, beta2), lr, v1, started = group["betas"], float(group["lr"]), group["v1"], int(count > 0)
    clip, kept = count**0.25, beta2 * started
    normalised = square.clamp_min(_least_square(group)).rsqrt_().mul_(gradient).clamp_(-clip, clip)
    mean.lerp_(normalised, 1 - beta1)
    if group["weight_decay"]:
        weight.mul_(1 - lr * decay_of(group) * started)
    weight.sub_(normalised.lerp_(mean, v1) if v1 < 1 else mean, alpha=lr)
    square.mul_(kept).addcmul_(gradient, gradient, value=1 - kept)


def _least_square(group: Mapping[str, Any]) -> float:
    """Return eps squared, but at least the smallest normal number.

    In float32 the square of a small eps is 0, and so is the second moment where no gradient was yet.
    """
    return max(float(group["eps"]) ** 2, torch.finfo(torch.float32).tiny)


def _foreach_update(
    weights: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor], counts: list[Any],
    group: Mapping[str, Any],
) -> None:  # fmt: skip
    (beta1, beta2), lr, v1 = group["betas"], group["lr"], group["v1"]
    clips = [count**0.25 for count in counts]  # 0 at the first step, whose normalised gradients so become zero
    normalised = torch._foreach_clamp_min(squares, _least_square(group))
    torch._foreach_rsqrt_(normalised)  # of the larger square: cheaper than a root and a quotient
    torch._foreach_mul_(normalised, gradients)
    torch._foreach_clamp_max_(normalised, clips)
    torch._foreach_clamp_min_(normalised, [-clip for clip in clips])
    torch._foreach_lerp_(means, normalised, 1 - beta1)
    if group["weight_decay"]:
        decay = decay_of(group)
        kept: Any = [1 - lr * decay * _later(count, weight) for count, weight in zip(counts, weights, strict=True)]
        torch._foreach_mul_(weights, kept)
    updates: Any = means
    if v1 < 1:
        torch._foreach_lerp_(normalised, means, v1)
        updates = normalised
    if isinstance(lr, Tensor):
        torch._foreach_sub_(weights, torch._foreach_mul(updates, lr))
    else:
        torch._foreach_add_(weights, updates, alpha=-lr)
    new: Any = [1 - beta2 * _later(count, square) for count, square in zip(counts, squares, strict=True)]
    torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), new)


def _later(count: Any, like: Tensor) -> Any:
    """Return 0 at the first step and 1 later, if ``count`` is known."""
    return (count > 0).to(like.dtype) if isinstance(count, Tensor) else int(count > 0)
