"""How a batch reaches the device: one function, or none where there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arclight.fabric.precision import Precision
from arclight.trainer.hooks import overridden
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(trainer: Trainer, module: Module, dataloader_idx: int = 0) -> Callable[[Any], Any] | None:
    """Precision cast, then the three transfer hooks of the module or, where the module has none, of the data module."""
    precision, device, data = trainer.precision_plugin, trainer.strategy.device, trainer.datamodule
    casts = type(precision).convert_input is not Precision.convert_input
    owners = [
        data if data is not None and not overridden(module, name, Module) and hasattr(data, name) else module
        for name in _HOOKS
    ]
    hooked = any(
        owner is not module or overridden(module, name, Module) for owner, name in zip(owners, _HOOKS, strict=True)
    )
    if not hooked:
        move = trainer.strategy.move
        if device.type == "cpu":
            return precision.convert_input if casts else None
        return (lambda batch: move(precision.convert_input(batch))) if casts else move
    before, transfer, after = (getattr(owner, name) for owner, name in zip(owners, _HOOKS, strict=True))

    def run(batch: Any) -> Any:
        if casts:
            batch = precision.convert_input(batch)
        return after(transfer(before(batch, dataloader_idx), device, dataloader_idx), dataloader_idx)

    return run
