"""How a batch reaches the device: one function, or none where there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arclight.fabric.precision import Precision
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.datamodule import DataModule
from arclight.trainer.hooks import logging_as, overridden
from arclight.trainer.module import Module
from arclight.trainer.signatures import note_iterator, takes_iterator

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(trainer: Trainer, module: Module, dataloader_idx: int = 0) -> Callable[[Any], Any] | None:
    """Precision cast, then the three transfer hooks, each the data module's own or else the module's.

    None where there is nothing to do, and for training steps that take their batches from an iterator.
    """
    if trainer.training and takes_iterator(module.training_step):
        note_iterator("training_step")
        return None
    precision, device = trainer.precision_plugin, trainer.strategy.device
    casts = type(precision).convert_input is not Precision.convert_input
    owners = [_owner(trainer, module, name) for name in _HOOKS]
    if all(owner is None for owner in owners):
        move = trainer.strategy.move
        if device.type == "cpu":
            return precision.convert_input if casts else None
        return (lambda batch: move(precision.convert_input(batch))) if casts else move
    before, transfer, after = (
        logging_as(module, name, getattr(owner, name)) if owner is not None else getattr(module, name)
        for owner, name in zip(owners, _HOOKS, strict=True)
    )

    def run(batch: Any) -> Any:
        if casts:
            batch = precision.convert_input(batch)
        return after(transfer(before(batch, dataloader_idx), device, dataloader_idx), dataloader_idx)

    return run


def _owner(trainer: Trainer, module: Module, name: str) -> Module | DataModule | None:
    """Whose version of a hook holds; None where nobody has one."""
    data = trainer.datamodule
    of_data = data is not None and overridden(data, name, DataModule) and not _wraps_default(data, name)
    of_module = overridden(module, name, Module)
    if of_data and of_module:
        rank_zero_warn(
            f"You have overridden `{name}` in both `LightningModule` and `LightningDataModule`. It will use the implementation "
            "from `LightningDataModule` instance."
        )
    return data if of_data else module if of_module else None


def _wraps_default(data: DataModule, name: str) -> bool:
    """Whether a hook is DataModule's own inside wrappers (``functools.wraps``), as tools put around hooks to watch them."""
    function = getattr(data, name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function) is getattr(DataModule, name)
