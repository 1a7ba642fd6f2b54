"""Assign samples to batches and ranks, as a pure function of (seed, epoch) and the sampler.

`loader` makes an `EpochSampler`; ``trainer.data.connector`` and ``trainer.fabric.fabric`` take seeds from `LoaderSeeds`. The global order
of samples must not depend on the number of ranks, nor change between versions: resumed runs continue in it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from arclight.data.computed_order import PADDING, ComputedOrder
from arclight.data.seeding import derive_seed, isolated_rng, own_generators
from arclight.fabric.warnings import PossibleUserWarning

_COMPUTED = 1024  # samples of a computed order that are found out together: one by one, calls would cost most
_UNSEEDED = torch.Generator().initial_seed()  # of a generator that nobody has given a seed


class LoaderSeeds:
    """Seeds of loaders that are read in parallel, so that their shuffled orders differ.

    The first loader has the run's seed itself, each further one a seed of its own. A loader with a ``torch.Generator`` that its user
    has seeded is ordered by that seed alone, so equal seeds give equal orders in every run; of loaders that share one such generator each
    further one has an order of its own.
    """

    def __init__(self) -> None:
        self._loaders = 0
        self._generators: dict[tuple[int, ...], tuple[list[torch.Generator], int]] = {}

    def next(self, loader: Any, run_seed: int) -> int:
        """Return the seed for ``loader``, which is read beside those asked for before."""
        number, self._loaders = self._loaders, self._loaders + 1
        given = [g for g in own_generators(loader, *_samplers_of(loader)) if isinstance(g, torch.Generator)]
        given = [generator for generator in given if generator.initial_seed() != _UNSEEDED]
        if given:
            key = tuple(map(id, given))
            _, number = self._generators.get(key, (given, 0))
            self._generators[key] = (given, number + 1)
            run_seed = derive_seed(-1, *(generator.initial_seed() for generator in given))
        return derive_seed(run_seed, -1, number) if number else run_seed  # -1: neither an epoch nor a cycle


def _samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, each once."""
    batches = getattr(loader, "batch_sampler", None)
    return _distinct((getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)))


def _distinct(samplers: Iterable[Any]) -> list[Any]:
    return list({id(sampler): sampler for sampler in samplers if sampler is not None}.values())


class EpochSampler:
    """Sampler of one rank's batches of indices, from a map-style DataLoader's samplers.

    In global order, batch ``b`` of a world of ``W`` ranks holds positions ``[b*B*W, (b+1)*B*W)`` and rank ``r`` takes
    every ``W``-th of them from ``r`` on. A sampler that yields whole batches (or a loader without batching) counts
    each of its items as one batch, so rank ``r`` loads items ``r, r + W, ...``.

    Training repeats items from the start of the order so that all ranks have equally many batches of equal size (or
    drops the tail, if the loader says ``drop_last``). Evaluation repeats nothing: a tail with fewer samples than ranks takes
    some of the batch before it, so that ranks have equally many batches wherever there is a sample for each; only items that
    are whole batches may leave them differing by one. A sampler that shards by itself (DistributedSampler) is taken as it is.

    A sampler that computes its order (see `arclight.data.computed_order`) is asked for what is loaded only, and all batches are
    full: the last ones are filled up with the sample -1 in the place of repeated ones, in training and evaluation alike.
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
        self._samplers = _distinct(found)
        sharded = any(isinstance(s, DistributedSampler) or hasattr(s, "num_replicas") for s in self._samplers)
        self.rank, self.world_size = (0, 1) if sharded else (rank, world_size)
        self._own = own_generators(loader, *self._samplers)
        self._placed = not (sharded and world_size > 1) and hasattr(self.source, "__len__")
        self._resumed_at: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank; raises TypeError without a length."""
        items = len(self.source)  # type: ignore[arg-type]
        kept = self._kept(items)
        if self._evened_tail(kept):
            return math.ceil(kept / self.global_batch)
        mine = len(range(self.rank, kept, self.world_size))
        return math.ceil(mine / self.batch_size)

    def _evened_tail(self, kept: int) -> int:
        """Count the samples that an evaluation's last batch takes from the one before."""
        tail = kept % self.global_batch
        evened = not self.train and self.batch_size > 1 and 0 < tail < self.world_size and kept > self.global_batch
        return self.world_size - tail if evened else 0

    @property
    def global_batch(self) -> int:
        """Positions of the global order that all ranks together take in one batch."""
        return self.batch_size * self.world_size

    def samples_before(self, epoch: int, batch: int) -> int | None:
        """Count the positions of the epoch's global order before a batch.

        None if ranks have no common order.
        """
        if (
            self._resumed_at is not None
            and self._resumed_at[0] == epoch
            and batch == self._resumed_at[1] // self.global_batch
        ):
            return self._resumed_at[1]
        return batch * self.global_batch if self._placed else None

    def seek(self, epoch: int, place: int) -> int | None:
        """Return the batch to continue with when ``place`` positions of the epoch are done.

        If that is within the batch, the batch leaves out what was done. None if ranks have no common order.
        """
        if not self._placed:
            return None
        if place >= self._kept(len(self.source)):  # type: ignore[arg-type]
            return math.ceil(self._kept(len(self.source)) / self.global_batch)  # type: ignore[arg-type]
        self._resumed_at = (epoch, place)
        return place // self.global_batch

    def batches(
        self, epoch: int, start: int = 0, *, seed: Callable[..., int] | None = None,
        order: tuple[int, int] | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield batches ``start, start + 1, ...``: lists of indices, or the sampler's own items.

        seed: gives the seed of the order, or with a batch's number that of its draws; by default from seed and epoch.
        order: seed and epoch of a computed order, if they are not this sampler's seed and ``epoch``.
        """
        seed = seed or partial(derive_seed, self.seed, epoch)
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if isinstance(self.source, ComputedOrder):
            shares = self._computed(self.source, epoch, start, *(order or (self.seed, epoch)))
        elif hasattr(self.source, "__len__"):
            shares = self._epoch(seed, epoch, start)
        else:
            shares = self._stream(seed, start)
        return shares if self.grouped else chain.from_iterable(shares)

    def _epoch(self, seed: Callable[..., int], epoch: int, start: int) -> Iterator[list[Any]]:
        with isolated_rng(seed(), self._own):
            order = list(self.source)
        kept = self._kept(len(order))
        order = order[:kept] if kept <= len(order) else list(islice(cycle(order), kept))
        size, taken = self.global_batch, self._evened_tail(kept)
        if self.world_size == 1 and (
            self._resumed_at is None or self._resumed_at[0] != epoch
        ):  # plain slices, without a call for each
            begins, ends = range(start * size, kept, size), range((start + 1) * size, kept + size, size)
            return map(order.__getitem__, map(slice, begins, ends))

        def share(batch: int) -> list[Any]:
            last, before = (batch + 1) * size >= kept, (batch + 2) * size >= kept
            begin = self._begin(epoch, batch) - (taken if last else 0)
            rest = order[begin : (batch + 1) * size - (taken if before and not last else 0)]
            missing = -len(rest) % self.world_size if self.train else 0
            return [*rest, *islice(cycle(order), missing)][self.rank :: self.world_size]

        shares = (share(batch) for batch in range(start, math.ceil(kept / size)))
        return (mine for mine in shares if mine)

    def _computed(self, source: ComputedOrder, epoch: int, start: int, seed: int, number: int) -> Iterator[list[Any]]:
        items, last = len(source), self._kept(len(source)) // self.global_batch
        ahead = max(1, _COMPUTED // self.batch_size)
        within = np.arange(self.rank, self.global_batch, self.world_size)
        for first in range(start, last, ahead):
            batches = np.arange(first, min(first + ahead, last))
            positions = (batches[:, None] * self.global_batch + within).ravel()
            there = (positions < items) & (positions >= self._begin(epoch, start))
            samples = np.full_like(positions, PADDING)
            samples[there] = source.sample_ids(positions[there], epoch=number, seed=seed)
            yield from samples.reshape(len(batches), -1).tolist()

    def _begin(self, epoch: int, batch: int) -> int:
        """Return the first position of a batch that is still to be done."""
        return max(batch * self.global_batch, self.samples_before(epoch, batch) or 0)

    def _stream(self, seed: Callable[..., int], start: int) -> Iterator[list[Any]]:
        """Yield as `_epoch` for a sampler without length, drawn one global batch at a time."""
        iterator, batch, first = iter(self.source), 0, list[Any]()
        size = self.global_batch
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
        """Count the positions of the global order that are used."""
        if self.drop_last:
            return items - items % self.global_batch
        if isinstance(self.source, ComputedOrder):
            return items + -items % self.global_batch
        return items + -items % self.world_size if self.train else items


class RankShard:
    """One rank's share of samples, for a loader that reads its samplers itself."""

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler, self.epoch = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.sampler.batches(self.epoch)


def shard_loader(loader: DataLoader[Any], sampler: EpochSampler) -> DataLoader[Any]:
    """Return a copy of `loader` that reads only the share that `sampler` has of its samples."""
    twin, shard = copy.copy(loader), RankShard(sampler)
    _replace(twin, **{"sampler" if loader.batch_sampler is None else "batch_sampler": shard})
    return twin


def resampled(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Copy `loader` (class and attributes) to take its samples from `sampler`."""
    twin = copy.copy(loader)
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    elif batches is not None:
        if not hasattr(batches, "sampler"):
            raise TypeError(
                f"{type(batches).__name__} has no attribute `sampler` to replace; keep the sampler as an attribute of that "
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
    """Return the batch sampler without ``drop_last``, in a copy if needed."""
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
