"""What is said about a stage's data when they arrive: mistakes are errors, what costs time or surprises is a warning."""

from __future__ import annotations

import math
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from arclight.data.combined import length_of
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warning_kinds import PossibleUserWarning

if TYPE_CHECKING:
    from arclight.trainer.dataloading import StageData
    from arclight.trainer.trainer import Trainer


def check_stage(trainer: Trainer, data: StageData) -> None:
    """Look at each loader, and at what they come to together."""
    name = {"validate": "val"}.get(data.stage, data.stage) + "_dataloader"
    for loader in data.user_loaders:
        if data.stage != "train" and shuffles(loader):
            rank_zero_warn(
                f"Your `{name}`'s sampler has shuffling enabled, it is strongly recommended that you turn shuffling off for "
                "val/test dataloaders: the order has no meaning there, and a limit then chooses other samples",
                category=PossibleUserWarning,
            )
        _check_workers(trainer, loader, name)
        _check_length(trainer, loader)
    if trainer.strategy.evaluates_together:
        _check_even(trainer, data)
    if data.stage == "train":
        _check_training(trainer, data)


def shuffles(loader: Any) -> bool:
    """Whether a DataLoader was made with ``shuffle=True``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), RandomSampler)


def usable_workers(processes: int) -> int:
    """Worker processes that each of several training processes can use on this machine, beside itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, processes)) - 1


def _check_workers(trainer: Trainer, loader: Any, name: str) -> None:
    if not isinstance(loader, DataLoader):
        return
    usable = usable_workers(trainer.num_devices)
    context = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method()
    if loader.num_workers > 0 and method == "spawn" and not loader.persistent_workers:
        rank_zero_warn(
            f"Consider setting `persistent_workers=True` in '{name}' to speed up the dataloader worker initialization."
        )
    elif loader.num_workers < 2 and usable > 1:
        rank_zero_warn(
            f"The '{name}' does not have many workers which may be a bottleneck. Consider increasing the value of the "
            f"`num_workers` argument` to `num_workers={usable}` in the `DataLoader`.",
            category=PossibleUserWarning,
        )


def _check_length(trainer: Trainer, loader: Any) -> None:
    """On every rank alike: lengths are exchanged where there are several processes."""
    length, kind = length_of(loader), type(loader).__name__
    total = sum(trainer.strategy.all_gather_object(length))
    if length == math.inf:
        return
    if total == 0:
        rank_zero_warn(f"Total length of `{kind}` across ranks is zero. Please make sure this was your intention.")
    elif length == 0:
        allowed = any(
            getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False)
            for owner in (trainer.lightning_module, trainer.datamodule)
        )
        if not allowed:
            raise MisconfigurationError(
                f"`{kind}` within local rank has zero length. Please make sure that it returns at least 1 batch, or set "
                "`allow_zero_length_dataloader_with_multiple_devices` on the module or data module"
            )
        rank_zero_warn(f"`{kind}` within local rank has zero length while others have batches: batches are uneven")
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when num_workers "
            "> 1), `__len__` could be inaccurate if each worker is not configured independently to avoid having duplicate data."
        )


def _check_even(trainer: Trainer, data: StageData) -> None:
    """Raise, on every rank, where one would run more batches than others, which would have left by then."""
    for counts in zip(*trainer.strategy.all_gather_object(data.counts), strict=True):
        fewest, most = min(counts), max(counts)
        if fewest != most:
            raise MisconfigurationError(
                f"`{data.stage}` would run {most} batches on rank {counts.index(most)} and {fewest} on rank {counts.index(fewest)}, but "
                f"with strategy={trainer.strategy.name!r} all processes take part in each: use a number of samples that as many "
                "processes as read data divide, batches of more than one sample (whose rest is shared out), or a limit on batches"
            )


def _check_training(trainer: Trainer, data: StageData) -> None:
    total = data.total
    if total == 0 and len(data.user_loaders) != 1:
        rank_zero_warn(
            "Total length of `CombinedLoader` across ranks is zero. Please make sure this was your intention."
        )
    if 0 < total < trainer.log_every_n_steps < math.inf and trainer.loggers and not trainer.fast_dev_run:
        rank_zero_warn(
            f"The number of training batches ({total}) is smaller than the logging interval "
            f"Trainer(log_every_n_steps={trainer.log_every_n_steps}). Set a lower value for log_every_n_steps if you want to see "
            "logs for the training epoch.",
            category=PossibleUserWarning,
        )
