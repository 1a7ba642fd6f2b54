"""Load batches under their own seeds, and announce them to data sets that read ahead.

`loader` makes a `Fetcher` of the user's data set and sends it one `Fetch`, with the batch's seed, for each batch; it runs in a DataLoader
worker or in the training process. Nothing may depend on the worker that loads a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from arclight.data.seeding import OwnGenerator, isolated_rng, own_generators


class Fetch(NamedTuple):
    """Message of `loader` to the worker that loads a batch."""

    epoch: int
    batch: int
    seed: int
    indices: Any


@runtime_checkable
class ReadAheadDataset(Protocol):
    """Protocol of data sets that can prefetch samples, such as token shards at an address."""

    read_ahead: int
    """How many batches ahead `prefetch` should be called; 0 for never."""

    def prefetch(self, samples: Sequence[int], consumer: Hashable) -> Any:
        """Start to fetch the samples of a batch; return a handle for `release`.

        consumer: identifies the pass over the data.
        """
        ...

    def release(self, prefetched: Any) -> None:
        """Free what `prefetch` reserved: the batch was read, or will not be."""
        ...


class ReadAhead:
    """Iterator over batches of indices that prefetches each some batches ahead."""

    def __init__(self, batches: Iterator[Any], dataset: ReadAheadDataset) -> None:
        self._batches, self._dataset = batches, dataset
        self._prefetched: deque[Any] = deque()
        self._consumer = object()

    def __iter__(self) -> Iterator[Any]:
        upcoming = deque[Any]()
        self._advance(upcoming, self._dataset.read_ahead + 1)
        while upcoming:
            yield upcoming.popleft()
            self._advance(upcoming, 1)

    def read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Iterate over the batches of these indices, releasing each reservation after reading.

        Threads then fetch while a step computes, and not while the next batch is read. Abandoning the iterator releases all.
        """
        return _ReadAheadIterator(self, batches)

    def release(self) -> None:
        """Release the reservation of the next unread batch, if there is one."""
        if self._prefetched:
            self._dataset.release(self._prefetched.popleft())

    def close(self) -> None:
        """Release all reservations."""
        while self._prefetched:
            self.release()

    def _advance(self, upcoming: deque[Any], count: int) -> None:
        for indices in islice(self._batches, count):
            self._prefetched.append(self._dataset.prefetch(indices, self._consumer))
            upcoming.append(indices)


class _ReadAheadIterator(Iterator[Any]):
    """Iterator over batches that releases ``ahead``.

    A generator would end after an error in one batch.
    """

    def __init__(self, ahead: ReadAhead, batches: Iterator[Any]) -> None:
        self._ahead, self._batches = ahead, batches

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        finally:
            self._ahead.release()

    def __del__(self) -> None:
        self._ahead.close()  # a loader with persistent workers keeps the iterator of indices alive


class Fetcher:
    """Map-style dataset of whole collated batches, each loaded under its `Fetch`'s seed.

    Dataset and collate function both run under that seed, so augmentation does not depend on the number of workers or
    on which of them loads the batch, and without workers the training process's RNG is not changed. The
    dataset's ``set_epoch`` is called in the process that loads, which keeps persistent workers up to date.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batched = batched
        self.epoch: int | None = None
        # generators that the data set holds; searched for in each process, since forks and pickles make copies
        self._own: list[OwnGenerator] | None = None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            for dataset in datasets_of(self.dataset):
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(epoch)

    def __getitem__(self, fetch: Fetch) -> Any:
        self.set_epoch(fetch.epoch)
        if self._own is None:
            datasets = datasets_of(self.dataset)
            self._own = own_generators(*datasets, *_helpers(datasets))
        try:
            with isolated_rng(fetch.seed, self._own):
                return self.collate(self._samples(fetch.indices))
        except Exception as error:
            error.add_note(f"while loading batch {fetch.batch} of epoch {fetch.epoch}, samples {fetch.indices}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None}

    def _samples(self, indices: Any) -> Any:
        if not self.batched:
            return self.dataset[indices]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


class WorkerInit:
    """Show workers the user's dataset in ``get_worker_info()``; run their ``worker_init_fn``."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Fetcher):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses plain assignment
        if self.function is not None:
            self.function(worker_id)


def identity(batch: Any) -> Any:
    """Return ``batch``: the collate function of loaders whose data set returns whole batches."""
    return batch


def datasets_of(dataset: Any) -> list[Any]:
    """List the dataset and those it wraps, outermost first.

    They are in ``.dataset`` (Subset) or ``.datasets`` (ConcatDataset).
    """
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in found or isinstance(one, (str, bytes, torch.Tensor, type)):
            continue
        found[id(one)] = one
        parts = getattr(one, "datasets", ())
        waiting.append(getattr(one, "dataset", None))
        waiting += parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else ()
    return list(found.values())


_FEW = 100
"""Most items of a list or dict in an attribute that is searched for generators: of transforms there are fewer, of samples more."""


def _helpers(datasets: list[Any]) -> list[Any]:
    """List the objects in attributes of datasets, such as transforms, and in theirs."""
    known, found, level = {id(dataset) for dataset in datasets}, list[Any](), datasets
    for _ in range(2):
        inside = {id(part): part for owner in level for part in _kept(owner) if id(part) not in known}
        level = list(inside.values())
        known |= inside.keys()
        found += level
    return found


def _kept(owner: Any) -> Iterator[Any]:
    """Yield the attributes of ``owner`` that have attributes, also from short lists and dicts."""
    for _, value in sorted(getattr(owner, "__dict__", {}).items()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
        for part in (value,) if several is None else several if len(several) <= _FEW else ():
            if hasattr(part, "__dict__") and not isinstance(part, (type, ModuleType, FunctionType, torch.Tensor)):
                yield part
