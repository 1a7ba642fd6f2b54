"""From a step's output to gradients that an optimizer can use: the loss, its backward, clipping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.fabric.batches import map_tensors
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies import Strategy
from arclight.trainer.loop.hooks import overridden, resolve
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


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


def clip_as_asked(trainer: Trainer, optimizer: Any, value: float | None, algorithm: str | None) -> None:
    """``Module.clip_gradients``: clip, unless that contradicts the trainer's own settings."""
    for name, own, given in (
        ("gradient_clip_val", trainer.gradient_clip_val, value),
        ("gradient_clip_algorithm", trainer.gradient_clip_algorithm, algorithm),
    ):
        if own is not None and given is not None and own != given:
            raise MisconfigurationError(
                f"You have set `Trainer({name}={own!r})` and have passed `clip_gradients({name}={given!r})`. "
                "Please use only one of them."
            )
    algorithm = algorithm or trainer.gradient_clip_algorithm or "norm"
    if algorithm not in ("norm", "value"):
        raise MisconfigurationError(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: ['value', 'norm']."
        )
    value = trainer.gradient_clip_val if value is None else value
    if value is None or value <= 0:
        return
    if not trainer.lightning_module.automatic_optimization:
        for managed in trainer.managed_optimizers:
            if optimizer is managed or optimizer is managed.optimizer:
                managed.unscale()
    clip(trainer.strategy, optimizer, value, algorithm)


def manual_backward(trainer: Trainer, module: Module, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """``Module.manual_backward``: the hooks, the scale of 16-bit gradients, and the other ranks."""
    if module.automatic_optimization:
        raise MisconfigurationError(
            "To use manual optimization, please set `self.automatic_optimization = False`: `manual_backward` was called, but the "
            "trainer runs backward and the optimizer of this module"
        )
    trainer.last_loss = loss
    for hook in resolve(trainer, module, "on_before_backward"):
        hook(loss)
    if overridden(module, "backward", Module):
        scaler = trainer.precision_plugin.scaler
        module.backward(scaler.scale(loss) if scaler is not None else loss, *args, **kwargs)
    else:
        trainer.strategy.backward(loss, module, *args, **kwargs)
    trainer.strategy.average_gradients(module)
    for hook in resolve(trainer, module, "on_after_backward"):
        hook()


def detach_outputs(output: Any) -> Mapping[str, Any]:
    """A step's output as hooks see it: a mapping, whose tensors do not hold on to how they came to be."""
    if not isinstance(output, Mapping):
        return {} if output is None else {"loss": _detached(output)}
    return {name: _detached(value) for name, value in output.items()}


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return map_tensors(value, torch.Tensor.detach) if isinstance(value, (dict, list, tuple)) else value


def warn_none_loss(trainer: Trainer) -> None:
    """Say once in a fit that ``training_step`` gave no loss."""
    if not trainer.told_of_no_loss:
        trainer.told_of_no_loss = True
        trainer.warn(
            "`training_step` returned `None`. If this was on purpose, ignore this warning: the batch trains nothing. Otherwise "
            "return the loss"
        )


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned; None means: skip this batch."""
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
