"""Where the loaders of a run come from and how they reach the loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from arclight.data import ResumableLoader
from arclight.trainer import limits
from arclight.trainer.datamodule import DataModule
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def source_of(trainer: Trainer, module: Module, given: Any, datamodule: Any, name: str) -> Any:
    """The loader (or loaders) for a stage: given, from the data module, or from the module itself; None if nowhere."""
    if given is not None:
        return given
    for owner in (datamodule, module):
        make = getattr(owner, name, None)
        if make is not None and getattr(type(owner), name, None) is not getattr(DataModule, name):
            return make()
    return None


def wrap_all(trainer: Trainer, source: Any) -> list[ResumableLoader]:
    """One resumable loader for each of a stage's loaders; a list or tuple holds several, anything else is one."""
    several = (
        isinstance(source, (list, tuple))
        and bool(source)
        and all(
            hasattr(part, "__iter__") and not isinstance(part, (list, tuple, torch.Tensor, dict, str))
            for part in source
        )
    )
    parts = list(source) if several else [] if source is None else [source]
    return [wrap(trainer, part, train=False) for part in parts]


def wrap(trainer: Trainer, loader: Any, train: bool) -> ResumableLoader:
    return ResumableLoader(
        loader, seed=trainer.data_seed, rank=trainer.global_rank, world_size=trainer.world_size, train=train
    )


def prepare_loaders(trainer: Trainer) -> None:
    """Make the loaders of a fit, once: when the trainer is about to begin or when a schedule asks how long it will be."""
    if trainer.train_loader is not None:
        return
    module, (train, val) = trainer.lightning_module, trainer.given_loaders
    source = source_of(trainer, module, train, trainer.datamodule, "train_dataloader")
    if source is None:
        raise ValueError(
            "fit needs training data: pass train_dataloaders or a datamodule, or give the module a train_dataloader()"
        )
    trainer.train_loader = wrap(trainer, source, train=True)
    limit = limits.batch_limit(trainer.settings.limit_train_batches, trainer.train_loader)
    trainer.num_training_batches = limits.count_batches(limit, trainer.train_loader)
    if trainer.num_training_batches == 0:
        raise ValueError(
            "there are no training batches: the data set is empty, smaller than one batch with drop_last, or limit_train_batches is 0"
        )
    if trainer.limits["validate"] != 0:
        trainer.val_loaders = wrap_all(trainer, source_of(trainer, module, val, trainer.datamodule, "val_dataloader"))
