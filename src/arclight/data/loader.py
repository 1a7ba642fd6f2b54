"""Resume a DataLoader at any batch of any epoch, bit for bit.

The Trainer (``trainer.data.connector``) and Fabric wrap users' loaders in a `ResumableLoader`; it is public, too. Keys of ``state_dict``
are in checkpoints, and the batches of an epoch are a function of seed, epoch, rank and world size (but for what a plain iterable draws after
its first batch, see `ResumableLoader`): both stay.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from arclight.data.fetching import Fetch, Fetcher, ReadAhead, ReadAheadDataset, WorkerInit, datasets_of, identity
from arclight.data.sampling import EpochSampler, shard_loader
from arclight.data.seeding import derive_seed, isolated_rng

_END = object()
_BUILTIN_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), repeat)
"""Iterators that run no code of users, so that nothing in them draws random numbers."""
_SNAPSHOTS = 4  # states kept of the newest batches, so that a consumer may look a few batches ahead
_SET_EPOCH_ON = ("dataset", "sampler", "batch_sampler")
"""Attributes of a loader whose ``set_epoch`` is called, as is the loader's own."""
_INHERITED: list[Any] = []
"""Workers that a forked process inherits: if it dropped them, they would be told to end while the parent reads from them."""
_SHARDING_NAMES = {"rank", "get_rank", "world_size", "get_world_size", "num_replicas", "num_shards", "shard"}


class ResumableLoader:
    """Resumable batches of a user's `loader`, by epoch and position.

    The loader itself is never changed.

    loader: a DataLoader, or any iterable of batches, or a function that returns one (such as a generator function).
    seed: with the epoch it determines the order of samples; with epoch, batch and rank, all randomness inside dataset
    and collate function (python, numpy and torch generators of the CPU, global or kept as attributes of the dataset, of those
    it is made of, or of objects that they keep, such as transforms).
    rank, world_size: this process's share; see `arclight.data.sampling.EpochSampler` for the rule.
    train: whether ranks are padded to equal numbers of batches; evaluation never repeats a sample.
    complete: whether a last batch that `drop_last` would leave out is read all the same, as predictions need it.
    shard: whether to share the samples out; otherwise every rank reads what the loader's own samplers give it.

    How exactly a position is reached depends on what the loader is:

    * map-style DataLoader: on indices, at once, for any number of workers, persistent or not.
    * IterableDataset without workers, or an iterable, with ``state_dict``/``load_state_dict``: from its state, see
      `state_dict`.
    * anything else: by reading and discarding. Iterables are seeded alike on all ranks, so that one that shuffles and
      then keeps its rank's share stays disjoint. A plain iterable is seeded up to its first batch and until it has
      caught up; after that it runs bare, at no cost, and what it draws comes from the random state of its consumer.

    Workers are started as the DataLoader says, by default forked, which is fastest: two give their first batch after 0.1 s, by a
    fork server, where each imports torch, after 5 to 10 s; then all are equally fast. A fork beside busy threads gives, very seldom,
    a worker that never begins, held by a lock of the interpreter. A fork server cannot, and is worth its start in runs of days::

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "arclight.data.loader"])  # imported once, in 5 s; workers then start in 0.2 s
        DataLoader(..., multiprocessing_context=context, persistent_workers=True)

    It pickles the data set for each worker: lambdas and local classes cannot go, and arrays in memory are copied. ``timeout=``
    (seconds for a batch) makes an error of such a wait.

    Raises TypeError if `loader` is none of these and ValueError for an impossible rank.
    """

    def __init__(
        self, loader: Any, *, seed: int = 0, rank: int = 0, world_size: int = 1, train: bool = True, complete: bool = False,
        shard: bool = True,
    ) -> None:  # fmt: skip
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: rank must be in 0..world_size - 1")
        if not hasattr(loader, "__iter__") and not callable(loader):
            raise TypeError(
                f"{type(loader).__name__} is not a loader: give a DataLoader, an iterable of batches (a list, an "
                "object with __iter__), or a function that returns one"
            )
        self.loader = loader
        self.seed, self.rank, self.world_size, self.train = seed, rank, world_size, train
        # A subclass with its own __iter__ is its own kind of loader; attributes would describe only half of what it does.
        self._is_torch = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._map_style = self._is_torch and not isinstance(loader.dataset, IterableDataset)
        self._generator = torch.Generator()  # the DataLoader's draw of a base seed must not touch the global state
        self._inner: DataLoader[Any] | None = None
        self._passes: weakref.WeakSet[_WorkerPass] | None = None
        """Those with workers that somebody still holds."""
        self._owner = os.getpid()
        """The process that the workers belong to."""
        self._plan = _Plan()
        self._stateful = self._find_stateful()
        self._snapshots: deque[dict[str, Any]] = deque(maxlen=_SNAPSHOTS)
        self._pending: dict[str, Any] | None = None
        self.indices: deque[Any] | None = None
        """Samples of the batches read and not yet asked for, once `track_indices` was called."""
        self._seeded: EpochSampler | None = None
        rank, world_size = (rank, world_size) if shard else (0, 1)
        if self._map_style:
            self._fetcher = Fetcher(loader.dataset, loader.collate_fn, batched=loader.batch_sampler is not None)
            self._sampler = self._seeded = EpochSampler(
                loader, seed=seed, rank=rank, world_size=world_size, train=train, complete=complete
            )
        elif isinstance(loader, DataLoader) and world_size > 1 and not isinstance(loader.dataset, IterableDataset):
            self._seeded = EpochSampler(
                loader, seed=seed, rank=rank, world_size=world_size, train=train, complete=complete
            )
            self.loader = shard_loader(loader, self._seeded)
        elif world_size > 1:
            self._warn_unless_sharded()

    @property
    def seeds(self) -> list[int]:
        """Seeds in the order of loaders, of which this one is all."""
        return [self.seed]

    def reseed(self, seed: int) -> None:
        """Set another seed from the next pass on."""
        self.seed = seed
        if self._seeded is not None:
            self._seeded.seed = seed

    @property
    def sized(self) -> bool:
        """Return True if the number of batches is known before they are read."""
        try:
            len(self)
        except (TypeError, NotImplementedError):
            return False
        return True

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank; raises TypeError if that is unknown."""
        if self._map_style:
            return len(self._sampler)
        if not self._is_torch:
            length: int = len(self.loader)
            return length
        samples: int = len(self.loader.dataset)
        if self.loader.batch_size is None:
            return samples
        batches: float = samples / self.loader.batch_size
        return math.floor(batches) if self.loader.drop_last else math.ceil(batches)

    @property
    def positioned(self) -> bool:
        """True if any batch can be reached at once, without state or reading earlier ones."""
        return self._map_style

    def samples_before(self, epoch: int, batch: int) -> int | None:
        """Count the samples of the epoch's global order before a batch; None if unknown."""
        return self._sampler.samples_before(epoch, batch) if self._map_style else None

    def seek(self, epoch: int, place: int) -> int | None:
        """Return the batch to start an epoch at when ``place`` samples of its order are done.

        That batch leaves out the samples that a run with another world size has done of it. None if places are unknown.
        """
        return self._sampler.seek(epoch, place) if self._map_style else None

    def track_indices(self) -> bool:
        """Record the samples of each batch in `indices`; return False if they are unknown."""
        self.indices = deque() if self._map_style and self._fetcher.batched else None
        return self.indices is not None

    def batches(self, epoch: int, start: int = 0, *, cycle: int = 0, seed_epoch: int | None = None) -> Iterator[Any]:
        """Yield batches ``start, start + 1, ...`` of the epoch on this rank.

        cycle: how often the loader was read through in this epoch before; each time has an order of its own.
        seed_epoch: the epoch that randomness goes by, if it is not the one that samplers and dataset are told.
        """
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch {epoch}, start {start}: neither can be negative")
        self._leave_to_parent()
        where = _Pass(epoch, epoch if seed_epoch is None else seed_epoch, cycle, self.seed)
        if self._map_style:
            return self._map_batches(where, start)
        _set_epoch(epoch, *(getattr(self.loader, name, None) for name in _SET_EPOCH_ON), self.loader)
        if self._stateful is not None or (self._is_torch and self.loader.num_workers == 0):
            return self._drawn_batches(where, start)
        if self._is_torch:
            return self._worker_batches(where, start)
        return self._bare_batches(where, start)

    def state_dict(self, batch: int | None = None, *, epoch: int | None = None, cycle: int = 0) -> dict[str, Any]:
        """Return the state of an iterable after `batch` batches; empty for other loaders.

        batch, epoch: default the newest handed out; a consumer that looks ahead names the last batch it has used, up to
        three back. Batch 0 is the start of an epoch (or of a cycle of it, see `batches`). Raises ValueError for a batch further back.
        """
        if self._stateful is None or not self._snapshots:
            return dict(self._pending or {})
        newest_first = list(reversed(self._snapshots))
        if batch == 0 and epoch is not None:
            newest_first = [snapshot for snapshot in newest_first if _when(snapshot) < (epoch, cycle)]
        if not batch:
            return dict(newest_first[0]) if newest_first else {}
        for snapshot in newest_first:
            if snapshot["batch"] == batch and (epoch is None or _when(snapshot) == (epoch, cycle)):
                return dict(snapshot)
        known = [(snapshot["epoch"], snapshot["batch"]) for snapshot in self._snapshots]
        raise ValueError(f"the state after batch {batch} is no longer known, only after (epoch, batch) {known}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`, for `batches` at that position or the next epoch."""
        self._pending = dict(state) or None
        self._snapshots.clear()

    def close(self) -> None:
        """End all workers; the next `batches` starts others.

        Passes that failed or were left end too, and cannot be read on. In a process that was forked off, the workers of its
        parent are left alone: they are the parent's to end.
        """
        self._leave_to_parent()
        # The error of a batch holds its pass in a circle. Left to the garbage collector, a worker costs 5 s: its queue is closed
        # before it is told to end.
        for unfinished in self._passes or ():
            unfinished.close()
        self._passes = None
        if self._inner is not None and isinstance(self._inner._iterator, _MultiProcessingDataLoaderIter):
            self._inner._iterator._shutdown_workers()
            self._inner._iterator = None

    def _leave_to_parent(self) -> None:
        """Start afresh in a process that was forked off since the workers were started."""
        if self._owner != os.getpid():
            _INHERITED.extend((self._inner, list(self._passes or ())))
            self._inner, self._passes, self._owner = None, None, os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_passes": None}  # workers belong to the process that has started them

    # Map-style DataLoader

    def _map_batches(self, where: _Pass, start: int) -> Iterator[Any]:
        self._fetcher.set_epoch(where.epoch)
        if self.indices is not None:
            self.indices.clear()
        order = (where.cycle_seed, where.seed_epoch)
        sampled = self._sampler.batches(where.epoch, start, seed=where.seed, order=order)
        ahead = self._ahead(sampled)
        self._plan.fetches = self._fetches(where, start, sampled if ahead is None else iter(ahead))
        if self._inner is None:
            self._inner = self._clone(
                dataset=self._fetcher,
                batch_size=None,
                sampler=self._plan,
                collate_fn=identity,
                worker_init_fn=WorkerInit(self.loader.worker_init_fn),
                persistent_workers=self.loader.persistent_workers,
            )
        batches = self._start(self._inner)
        return batches if ahead is None else ahead.read(batches)

    def _start(self, inner: DataLoader[Any]) -> Iterator[Any]:
        """Start a pass that `close` can end."""
        batches = iter(inner)
        if not isinstance(batches, _MultiProcessingDataLoaderIter):
            return batches
        if self._passes is None:
            self._passes = weakref.WeakSet()
        self._passes.add(started := _WorkerPass(batches))
        return started

    def _ahead(self, sampled: Iterator[Any]) -> ReadAhead | None:
        dataset = self.loader.dataset
        return ReadAhead(sampled, dataset) if isinstance(dataset, ReadAheadDataset) and dataset.read_ahead else None

    def _fetches(self, where: _Pass, start: int, sampled: Iterator[Any]) -> Iterator[Fetch]:
        for batch, indices in enumerate(sampled, start):
            if self.indices is not None:
                self.indices.append(indices)
            yield Fetch(where.epoch, batch, where.seed(batch, self.rank), indices)

    def _clone(self, **differences: Any) -> DataLoader[Any]:
        """Return a DataLoader with the user's settings, but with batches in order.

        Out of order there is no position.
        """
        loader = self.loader
        settings: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "pin_memory_device": loader.pin_memory_device,
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "generator": self._generator,
        }
        return DataLoader(**(settings | differences))

    # Everything else

    def _open(self, where: _Pass) -> Iterator[Any]:
        """Yield the epoch's iterator from its beginning (or from where its loaded state says)."""
        if not self._is_torch:
            source = self.loader if hasattr(self.loader, "__iter__") else self.loader()
            with isolated_rng(where.seed()):
                return iter(source)
        if self._inner is None:
            # Workers are started again for each epoch: a running one can be given neither the epoch nor its seed.
            self._inner = self._clone(
                dataset=self.loader.dataset,
                batch_size=self.loader.batch_size,
                drop_last=self.loader.drop_last,
                collate_fn=self.loader.collate_fn,
                worker_init_fn=self.loader.worker_init_fn,
            )
        self._generator.manual_seed(where.seed())
        with isolated_rng(where.seed()):
            return self._start(self._inner)

    def _bare_batches(self, where: _Pass, start: int) -> Iterator[Any]:
        iterator = self._open(where)
        one_shot = iterator is self.loader
        if type(iterator) in _BUILTIN_ITERATORS and not one_shot:
            return islice(iterator, start, None) if start else iterator
        with isolated_rng(where.seed()):
            deque(islice(iterator, start), maxlen=0)
            if start:
                return iterator
            first = next(iterator, _END)
        if first is not _END:
            return chain((first,), iterator)
        if one_shot:
            warnings.warn(
                f"{type(self.loader).__name__} has no batches left for epoch {where.epoch}: an iterator can be read once; "
                "give a list, an object with __iter__ or a generator function to read it in every epoch",
                stacklevel=3,
            )
        return iterator

    def _worker_batches(self, where: _Pass, start: int) -> Iterator[Any]:
        if start:
            self._warn_of_reading(start, "its state lives in worker processes; num_workers=0")
        iterator = self._open(where)
        return islice(iterator, start, None) if start else iterator

    def _drawn_batches(self, where: _Pass, start: int) -> Iterator[Any]:
        first, continues, exhausted = self._restore(where, start)
        if exhausted:
            return iter(())
        if start > first and self._is_torch:
            self._warn_of_reading(start - first, "there is no state to start from;")
        return self._draw(self._open(where), where, first, start, continues)

    def _draw(self, iterator: Iterator[Any], where: _Pass, first: int, start: int, continues: bool) -> Iterator[Any]:
        for batch in count(first):
            with isolated_rng(where.seed(batch)):
                item = next(iterator, _END)
                if item is _END and continues and batch == first:
                    iterator = self._open(where)  # the state was that of an ended epoch: this one starts over
                    item = next(iterator, _END)
            if item is _END:
                return
            if self._stateful is not None:
                state = copy.deepcopy(self._stateful.state_dict())
                # A last batch that is not full has read past the end, where a data set may have reset its state.
                exhausted = bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))
                self._snapshots.append({**where.key(), "batch": batch + 1, "state": state, "exhausted": exhausted})
            if batch >= start:
                yield item

    def _restore(self, where: _Pass, start: int) -> tuple[int, bool, bool]:
        """Load the pending state if it fits.

        Return the batch that the source is at then, whether it ended the pass before, and whether this pass has no more batches.
        """
        pending, self._pending = self._pending, None
        if self._stateful is None or pending is None:
            return 0, False, False
        here = _when(pending) == (where.epoch, where.cycle) and pending["batch"] <= start
        before = (where.epoch, where.cycle - 1) if where.cycle else None
        ended = start == 0 and (_when(pending) == before if before else pending["epoch"] == where.epoch - 1)
        if not here and not ended:
            return 0, False, False
        self._stateful.load_state_dict(copy.deepcopy(pending["state"]))
        self._snapshots.append(pending)
        return (pending["batch"] if here else 0), ended, here and pending.get("exhausted", False)

    def _find_stateful(self) -> Any:
        """Return the object whose state has the position, if it is in this process."""
        if self._map_style or (self._is_torch and self.loader.num_workers > 0):
            return None
        source = self.loader.dataset if self._is_torch else self.loader
        return source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None

    def _warn_of_reading(self, batches: int, why: str) -> None:
        warnings.warn(
            f"reaching the position in {type(self.loader.dataset).__name__} by reading and discarding {batches} "
            f"batches: {why} with state_dict and load_state_dict on the dataset it resumes at once",
            stacklevel=4,
        )

    def _warn_unless_sharded(self) -> None:
        source = self.loader.dataset if self._is_torch else self.loader
        code = getattr(getattr(source if callable(source) else type(source).__iter__, "__code__", None), "co_names", ())
        if _SHARDING_NAMES.isdisjoint(code) and _SHARDING_NAMES.isdisjoint(getattr(source, "__dict__", ())):
            warnings.warn(
                f"all {self.world_size} ranks will read the same samples: nothing in {type(source).__name__} keeps to "
                "its rank's share; skip the others' samples (torch.distributed.get_rank() and get_world_size()) or use "
                "a map-style dataset, which is divided among ranks for you",
                stacklevel=3,
            )


class _WorkerPass(Iterator[Any]):
    """Iterator over workers' batches that raises after `close`.

    The DataLoader's would just stop.
    """

    def __init__(self, batches: _MultiProcessingDataLoaderIter) -> None:
        self._batches: Iterator[Any] = batches
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise RuntimeError(
                "these batches cannot be read on: their loader was closed before they ended, and its workers with it; call `batches` "
                "again, from the batch that is next"
            )
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(())  # persistent workers go on with the next pass
            raise

    def close(self) -> None:
        if isinstance(self._batches, _MultiProcessingDataLoaderIter):
            self._closed = True
            self._batches._shutdown_workers()


class _Plan:
    """The sampler of the inner DataLoader: what to load in the epoch that begins now."""

    fetches: Iterator[Fetch]

    def __iter__(self) -> Iterator[Fetch]:
        return self.fetches


class _Pass(NamedTuple):
    """One reading of a loader from end to end."""

    epoch: int
    seed_epoch: int
    cycle: int
    base: int

    def key(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cycle": self.cycle}

    def seed(self, *parts: int) -> int:
        """Return the seed of this reading, or of a part of it."""
        return derive_seed(self.cycle_seed, self.seed_epoch, *parts)

    @property
    def cycle_seed(self) -> int:
        return derive_seed(self.base, self.cycle) if self.cycle else self.base


def _when(snapshot: dict[str, Any]) -> tuple[int, int]:
    """Return epoch and cycle of a snapshot."""
    return snapshot["epoch"], snapshot.get("cycle", 0)


def _set_epoch(epoch: int, *objects: Any) -> None:
    notified = {id(part): part for item in objects for part in datasets_of(item)}
    for item in notified.values():
        if hasattr(item, "set_epoch"):
            item.set_epoch(epoch)
