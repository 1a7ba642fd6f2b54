"""Which samples form which batch on which rank: a pure function of (seed, epoch) and of the user's own sampler."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from arclight.data.seeding import derive_seed, isolated_rng, own_generators
from arclight.fabric.warning_kinds import PossibleUserWarning


class EpochSampler:
    """The batches of indices that one rank loads in an epoch, taken from the samplers of a map-style DataLoader.

    In global order, batch ``b`` of a world of ``W`` ranks holds positions ``[b*B*W, (b+1)*B*W)`` and rank ``r`` takes
    every ``W``-th of them from ``r`` on. A sampler that yields whole batches (or a loader without batching) counts
    each of its items as one batch, so rank ``r`` loads items ``r, r + W, ...``.

    Training repeats items from the start of the order so that all ranks have equally many batches of equal size (or
    drops the tail, where the loader says ``drop_last``). Evaluation repeats nothing: ranks may differ by a batch.
    A sampler that shards by itself (DistributedSampler) is taken as it is.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, rank: int, world_size: int, train: bool, complete: bool = False
    ) -> None:
        batches = loader.batch_sampler
        if complete and batches is not None:
            batches = _keeping_all(batches)
        self.source: Iterable[Any] = loader.sampler if batches is None else batches
        self.batch_size, self.drop_last = 1, False
        self.grouped = type(batches) is BatchSampler  # a subclass may group in ways of its own
        if isinstance(batches, BatchSampler) and self.grouped:
            self.source, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self.seed = seed
        self.train = train
        found = (loader.sampler, batches, getattr(batches, "sampler", None))
        self._samplers: list[Any] = list({id(sampler): sampler for sampler in found if sampler is not None}.values())
        sharded = any(isinstance(s, DistributedSampler) or hasattr(s, "num_replicas") for s in self._samplers)
        self.rank, self.world_size = (0, 1) if sharded else (rank, world_size)
        self._own = own_generators(loader, *self._samplers)

    def __len__(self) -> int:
        """Batches of an epoch on this rank; raises TypeError where the sampler has no length."""
        items = len(self.source)  # type: ignore[arg-type]
        mine = len(range(self.rank, self._kept(items), self.world_size))
        return math.ceil(mine / self.batch_size)

    def batches(self, epoch: int, start: int = 0, *, seed: Callable[..., int] | None = None) -> Iterator[Any]:
        """Batches ``start, start + 1, ...`` of the epoch: lists of indices, or the sampler's own items.

        seed: gives the seed of the order, or with a batch's number that of its draws; by default from seed and epoch.
        """
        seed = seed or partial(derive_seed, self.seed, epoch)
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        shares = self._stream(seed, start) if not hasattr(self.source, "__len__") else self._epoch(seed, start)
        return shares if self.grouped else (item for share in shares for item in share)

    def _epoch(self, seed: Callable[..., int], start: int) -> Iterator[list[Any]]:
        with isolated_rng(seed(), self._own):
            order = list(self.source)
        kept = self._kept(len(order))
        order = order[:kept] if kept <= len(order) else list(islice(cycle(order), kept))
        mine = order[self.rank :: self.world_size]
        return (mine[i : i + self.batch_size] for i in range(start * self.batch_size, len(mine), self.batch_size))

    def _stream(self, seed: Callable[..., int], start: int) -> Iterator[list[Any]]:
        """As `_epoch` for a sampler without length, which may be endless: drawn one global batch at a time."""
        iterator, batch, first = iter(self.source), 0, list[Any]()
        size = self.batch_size * self.world_size
        while True:
            with isolated_rng(seed(batch), self._own):
                items = list(islice(iterator, size))
            first = first or items
            kept = self._kept(len(items))
            items = items[:kept] + list(islice(cycle(first), max(0, kept - len(items))))
            share = items[self.rank :: self.world_size]
            if not share:
                return
            if batch >= start:
                yield share
            batch += 1

    def _kept(self, items: int) -> int:
        """Positions of the global order that are used: fewer than `items` when dropping the tail, more when padding."""
        if self.drop_last:
            return items - items % (self.batch_size * self.world_size)
        return items + -items % self.world_size if self.train else items


class RankShare:
    """One rank's share of a loader's samples, for a loader that reads its samplers in a way of its own."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler, self.epoch = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.batches(self.epoch)


def shared_out(loader: DataLoader[Any], sampler: EpochSampler) -> DataLoader[Any]:
    """A copy of `loader` that reads only the share that `sampler` has of its samples."""
    twin, share = copy.copy(loader), RankShare(sampler)
    _replace(twin, **{"sampler" if loader.batch_sampler is None else "batch_sampler": share})
    return twin


def resampled(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A copy of `loader` (of its own class, with all its attributes) that takes its samples from `sampler`."""
    twin = copy.copy(loader)
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    elif batches is not None:
        if not hasattr(batches, "sampler"):
            raise TypeError(
                f"{type(batches).__name__} keeps no `sampler` that could be replaced; keep one as an attribute of that "
                "name, or leave sampling to it"
            )
        batches = copy.copy(batches)
        batches.sampler = sampler
    _replace(twin, sampler=sampler, batch_sampler=batches)
    return twin


def _replace(loader: DataLoader[Any], **samplers: Any) -> None:
    for name, value in {**samplers, "_iterator": None}.items():
        object.__setattr__(loader, name, value)  # a DataLoader refuses plain assignment


def _keeping_all(batches: Any) -> Any:
    """The batch sampler without ``drop_last``, in a copy where need be."""
    if not hasattr(batches, "drop_last"):
        warnings.warn(
            f"the custom batch sampler {type(batches).__name__} says nothing of drop_last. Make sure your sampler is "
            "configured correctly to return all indices, or predictions will be incomplete",
            PossibleUserWarning,
            stacklevel=4,
        )
        return batches
    if batches.drop_last:
        batches = copy.copy(batches)
        batches.drop_last = False
    return batches
