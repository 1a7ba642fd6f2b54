"""Compute gradients from a step's output: check the loss, run backward, clip.

`step` calls it for every batch, `Trainer` for manual optimization (``manual_backward``, ``clip_gradients``), whose arguments are
Lightning's; `diagnosis`, `MicroBatching` and the learning rate finder read losses by `loss_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.batches import map_tensors
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision import Precision
from arclight.fabric.strategies import Strategy


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip(strategy: Strategy, optimizer: Optimizer, value: float, algorithm: str = "norm") -> None:
    """Clip gradients by their global 2-norm (``norm``) or by element (``value``)."""
    if algorithm == "value":
        strategy.clip_value(parameters_of(optimizer), value)
    elif algorithm == "norm":
        strategy.clip_norm(parameters_of(optimizer), value)
    else:
        raise ValueError(f"gradient_clip_algorithm={algorithm!r} is not known; choose norm or value")


def clip_settings(
    own: tuple[float | None, str | None], given: tuple[float | None, str | None]
) -> tuple[float | None, str]:
    """Combine the trainer's ``own`` clipping with the arguments of ``clip_gradients``.

    Each is a value and an algorithm.

    Raises MisconfigurationError if they contradict each other, and for an unknown algorithm.
    """
    for name, mine, theirs in zip(("gradient_clip_val", "gradient_clip_algorithm"), own, given, strict=True):
        if mine is not None and theirs is not None and mine != theirs:
            raise MisconfigurationError(
                f"You have set `Trainer({name}={mine!r})` and have passed `clip_gradients({name}={theirs!r})`. "
                "Please use only one of them."
            )
    algorithm = given[1] or own[1] or "norm"
    if algorithm not in ("norm", "value"):
        raise MisconfigurationError(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: ['value', 'norm']."
        )
    return own[0] if given[0] is None else given[0], algorithm


def manual_backward(
    module: nn.Module,
    own: Callable[..., Any] | None,
    loss: torch.Tensor,
    strategy: Strategy,
    precision: Precision,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the backward pass of a manual step and average its gradients over ranks.

    ``own``: the module's ``backward``, if it overrides that; it gets a loss that is scaled if precision asks for it.
    """
    if own is not None:
        own(precision.scale(loss), *args, **kwargs)
    else:
        strategy.backward(loss, module, *args, **kwargs)
    strategy.average_gradients(module)


def detach_outputs(output: Any) -> Mapping[str, Any]:
    """Detach the step's output and return it as a mapping, for hooks."""
    if not isinstance(output, Mapping):
        return {} if output is None else {"loss": _detached(output)}
    return {name: _detached(value) for name, value in output.items()}


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return map_tensors(value, torch.Tensor.detach) if isinstance(value, (dict, list, tuple)) else value


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in the output of ``training_step``; None means: skip this batch."""
    if output is None:
        return None
    if isinstance(output, Mapping) and "loss" not in output:
        raise MisconfigurationError(
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present; "
            f"it has {', '.join(map(repr, output)) or 'no keys'}"
        )
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise MisconfigurationError(
            f"In automatic optimization, `training_step` must return a Tensor, a dict, or None (training_step must return a scalar "
            f"tensor, a dict with 'loss', or None to skip the batch); got {kind}"
        )
    return loss
