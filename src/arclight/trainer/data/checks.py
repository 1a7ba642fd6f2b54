"""Validate the loaders of a stage: raise on mistakes, warn of slow or surprising settings.

`connector` calls `check_stage` whenever it loads a stage, on all ranks, and `check_training` for training. Texts of warnings are
Lightning's if it has them: users filter by them.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from arclight.data.combined import Count, length_of
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.launchers import available_cores
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


class _Share(NamedTuple):
    """The batches that the loaders of one process have."""

    lengths: list[Count]
    """Length of each of the user's loaders, before they are divided among ranks."""
    counts: Sequence[Count]
    """Batches of each of them in this process, within the limits."""
    total: Count


def check_stage(
    stage: str, loaders: Sequence[Any], counts: Sequence[Count], total: Count, strategy: Strategy, owners: Sequence[Any],
    workers_share: int,
) -> bool:  # fmt: skip
    """Check a stage's loaders on all ranks; return True if any rank has batches.

    A collective; what it refuses it refuses on every process. ``counts``: batches of each loader in this process, within the
    limits; ``total``: of all together; ``owners``: module and data module, which may allow that some processes have no batches;
    ``workers_share``: processes that share this machine's cores.
    """
    name = {"validate": "val"}.get(stage, stage) + "_dataloader"
    for loader in loaders:
        if stage != "train" and shuffles(loader):
            rank_zero_warn(
                f"Your `{name}`'s sampler has shuffling enabled, it is strongly recommended that you turn shuffling off for "
                "val/test dataloaders: the order has no meaning there, and a limit then chooses other samples",
                category=PossibleUserWarning,
            )
        _check_workers(loader, name, workers_share)
    own = _Share([length_of(loader) for loader in loaders], counts, total)
    shares = [_Share(*share) for share in strategy.all_gather_object(tuple(own))]
    runs = any(share.total for share in shares)
    if stage == "train" and runs and (without := [r for r, share in enumerate(shares) if share.total == 0]):
        raise nothing_to_train(without)
    if len({len(share.lengths) for share in shares}) > 1:
        raise MisconfigurationError(
            f"processes have different numbers of loaders from `{name}()`: {[len(share.lengths) for share in shares]} by rank; give "
            "all of them the same number (a loader may be empty in an evaluation)"
        )
    for number, loader in enumerate(loaders):
        _check_length(loader, [share.lengths[number] for share in shares], strategy.global_rank, owners)
    if strategy.evaluates_together:
        _check_even(strategy, stage, shares)
    return runs


def shuffles(loader: Any) -> bool:
    """Return True for a DataLoader that was made with ``shuffle=True``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), RandomSampler)


def usable_workers(processes: int) -> int:
    """Count the loader workers that each training process can use on this machine."""
    return max(1, available_cores() // max(1, processes)) - 1


def _check_workers(loader: Any, name: str, processes: int) -> None:
    if not isinstance(loader, DataLoader):
        return
    usable = usable_workers(processes)
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


def _check_length(loader: Any, lengths: list[Count], rank: int, owners: Sequence[Any]) -> None:
    """Check a loader's lengths on all ranks; infinity stands for an unknown one."""
    length, kind = lengths[rank], type(loader).__name__
    if sum(lengths) == 0:
        rank_zero_warn(f"Total length of `{kind}` across ranks is zero. Please make sure this was your intention.")
    elif 0 in lengths:
        without = [rank for rank, length in enumerate(lengths) if length == 0]
        allowed = any(getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False) for owner in owners)
        if not allowed:
            raise MisconfigurationError(
                f"`{kind}` within local rank has zero length on rank {_listed(without)}, and batches on others. Please make sure that "
                "it returns at least 1 batch, or set `allow_zero_length_dataloader_with_multiple_devices` on the module or data module"
            )
        rank_zero_warn(
            f"`{kind}` has zero length on rank {_listed(without)} while others have batches: batches are uneven"
        )
    if length == math.inf:
        return
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when num_workers "
            "> 1), `__len__` could be inaccurate if each worker is not configured independently to avoid having duplicate data."
        )


def _check_even(strategy: Strategy, stage: str, shares: list[_Share]) -> None:
    """Raise an error if one rank would run more batches than others."""
    for counts in zip(*(share.counts for share in shares), strict=True):
        fewest, most = min(counts), max(counts)
        if fewest != most:
            raise MisconfigurationError(
                f"`{stage}` would run {most} batches on rank {counts.index(most)} and {fewest} on rank {counts.index(fewest)}, but "
                f"with strategy={strategy.name!r} all processes take part in each: use a number of samples that as many "
                "processes as read data divide, batches of more than one sample (whose rest is divided among ranks), or a limit on batches"
            )


def check_training(total: Count, loaders: int, log_every: int) -> None:
    """Warn if training has no batches, or too few for a row each ``log_every`` steps.

    ``log_every``: 0 for no such warning.
    """
    if total == 0 and loaders != 1:
        rank_zero_warn(
            "Total length of `CombinedLoader` across ranks is zero. Please make sure this was your intention."
        )
    if log_every:
        rank_zero_warn(
            f"The number of training batches ({total}) is smaller than the logging interval "
            f"Trainer(log_every_n_steps={log_every}). Set a lower value for log_every_n_steps if you want to see "
            "logs for the training epoch.",
            category=PossibleUserWarning,
        )


def nothing_to_train(ranks: list[int]) -> MisconfigurationError:
    """Make the error for ranks without a training batch, which others would wait for."""
    return MisconfigurationError(
        f"rank {_listed(ranks)} has no training batch while others have some, and would be waited for in every step: give every "
        "process as many batches (a map-style data set in a plain DataLoader is divided evenly among ranks by itself)"
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
