"""Load one batch under its own seed, in a DataLoader worker or in the training process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import get_worker_info

from arclight.data.seeding import OwnGenerator, isolated_rng, own_generators


class Fetch(NamedTuple):
    """Hold the message of `loader` to the worker that loads a batch."""

    epoch: int
    batch: int
    seed: int
    indices: Any


@runtime_checkable
class ReadsAhead(Protocol):
    """A data set that fetches samples before they are needed, where it is told which."""

    read_ahead: int
    """Batches ahead that it wants to know; 0 for none."""

    def expect(self, samples: Sequence[int], consumer: Hashable) -> Any:
        """Begin to fetch the samples of a batch, and return what `release` is given. consumer: stands for the pass."""
        ...

    def release(self, expected: Any) -> None: ...


class Ahead:
    """Batches of indices, of which a data set that reads ahead is told before they are asked for."""

    def __init__(self, batches: Iterator[Any], dataset: ReadsAhead) -> None:
        self._batches, self._dataset = batches, dataset
        self._expected: deque[Any] = deque()
        self._consumer = object()

    def __iter__(self) -> Iterator[Any]:
        waiting = deque[Any]()
        self._expect(waiting, self._dataset.read_ahead + 1)
        while waiting:
            yield waiting.popleft()
            self._expect(waiting, 1)

    def read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of a loader that is given these indices; what is expected of one is released once it was read.

        Threads then fetch while a step computes, and not while the next batch is read. A pass that is left releases all.
        """
        return _Read(self, loader)

    def release(self) -> None:
        """Release what is expected of the next batch that has not been read, if there is one."""
        if self._expected:
            self._dataset.release(self._expected.popleft())

    def close(self) -> None:
        """Release all that is expected."""
        while self._expected:
            self.release()

    def _expect(self, waiting: deque[Any], count: int) -> None:
        for indices in islice(self._batches, count):
            self._expected.append(self._dataset.expect(indices, self._consumer))
            waiting.append(indices)


class _Read(Iterator[Any]):
    """Batches of a loader, in the order of those of ``ahead``; not a generator, which an error of one batch would end."""

    def __init__(self, ahead: Ahead, loader: Iterable[Any]) -> None:
        self._ahead = ahead
        self._batches = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        finally:
            self._ahead.release()

    def __del__(self) -> None:
        self._ahead.close()  # a loader with persistent workers keeps the iterator over indices


class Fetcher:
    """A map-style dataset whose items are whole collated batches, each loaded under the seed in its `Fetch`.

    Dataset and collate function both run under that seed, so augmentation does not depend on the number of workers or
    on which of them loads the batch, and without workers the training process's RNG is left alone. The
    dataset's ``set_epoch`` is called in whichever process it is, which keeps persistent workers up to date.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batched = batched
        self.epoch: int | None = None
        self._own: list[OwnGenerator] | None = (
            None  # found in the process that uses them: forks and pickles make copies
        )

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
    """Shows workers the user's dataset in ``get_worker_info()``, then runs the user's ``worker_init_fn``."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Fetcher):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses plain assignment
        if self.function is not None:
            self.function(worker_id)


def identity(batch: Any) -> Any:
    """`Fetcher` has collated already."""
    return batch


def datasets_of(dataset: Any) -> list[Any]:
    """List the dataset and those it wraps, as ``.dataset`` (Subset) or ``.datasets`` (ConcatDataset), outermost first."""
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
"""Longest list of an attribute that is looked through: lists of transforms are shorter, lists of samples longer."""


def _helpers(datasets: list[Any]) -> list[Any]:
    """List the objects that datasets keep, such as transforms, and those that these keep, each once."""
    known, found, level = {id(dataset) for dataset in datasets}, list[Any](), datasets
    for _ in range(2):
        inside = {id(part): part for owner in level for part in _kept(owner) if id(part) not in known}
        level = list(inside.values())
        known |= inside.keys()
        found += level
    return found


def _kept(owner: Any) -> Iterator[Any]:
    """Yield the objects among the attributes of ``owner`` that have attributes themselves, and those in short lists there."""
    for _, value in sorted(getattr(owner, "__dict__", {}).items()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
        for part in (value,) if several is None else several if len(several) <= _FEW else ():
            if hasattr(part, "__dict__") and not isinstance(part, (type, ModuleType, FunctionType, torch.Tensor)):
                yield part
