"""Combine loaders, side by side or in sequence, resumable at any batch.

``trainer.data.connector`` combines what ``train_dataloader`` and the like return (lists, dicts) by this; users make a `CombinedLoader` as
in Lightning. Modes and properties are Lightning's and stay; keys of `ResumableCombination.state_dict` are in checkpoints.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, get_args

import torch

from arclight.data.loader import ResumableLoader

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
Count = int | float
"""A number of batches; infinity if it is not known."""

_END = object()


class CombinedLoader:
    """Loader that reads a tree of loaders (nested dicts, lists, tuples, dataclasses) as one.

    Iterating gives ``(batch, batch_idx, dataloader_idx)``. By `mode`:

    * ``min_size``: a batch from each loader in the same tree, until the first of them ends;
    * ``max_size_cycle``: until the last has ended, the others starting again whenever they end;
    * ``max_size``: until the last has ended, None standing for those that have;
    * ``sequential``: the batches of one loader after another, as they are; ``batch_idx`` counts within each.

    Containers of numbers or words alone are iterables themselves, not trees of them. A Trainer reads the parts through
    resumable loaders of its own; as training data it takes every mode but ``sequential``, and resumes exactly.
    Raises ValueError for an unknown mode.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"Unsupported mode {mode!r}, please select one of: {', '.join(get_args(Mode))}")
        self.mode: Mode = mode
        self._iterables = iterables
        self._flattened, self.rebuild = flatten(iterables)
        self._limits: list[Count] | None = None
        self._iterator: Iterator[tuple[Any, int, int]] | None = None

    @property
    def iterables(self) -> Any:
        """The loaders as they were given."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """All loaders, in the order of the tree; may be set to as many others."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(
                f"Mismatch in flattened length ({len(loaders)}) and existing length ({len(self._flattened)})"
            )
        self._flattened = loaders
        self._iterables = self.rebuild(loaders)

    @property
    def limits(self) -> list[Count] | None:
        """Most batches to read of each loader, each time through it; one number may be set for all."""
        return self._limits

    @limits.setter
    def limits(self, limits: Count | list[Count] | None) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self._flattened)
        if limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"Mismatch in number of limits ({len(limits)}) and number of iterables ({len(self._flattened)})"
            )
        self._limits = limits

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in the tree's shape; None for a loader that has none."""
        return self.rebuild([getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in the tree's shape; None for a loader that has none."""
        return self.rebuild([getattr(loader, "batch_sampler", None) for loader in self._flattened])

    def __len__(self) -> int:
        """Return the number of batches, after ``iter``; TypeError if a loader has no length."""
        if self._iterator is None:
            raise RuntimeError(
                "Please call `iter(combined_loader)` first: a run may still replace or limit its loaders"
            )
        length = combined_length(self.mode, [length_of(loader) for loader in self._flattened], self._limits)
        if length == math.inf:
            raise TypeError(f"not all of the {len(self._flattened)} loaders have a length")
        return int(length)

    def __iter__(self) -> CombinedLoader:
        self._iterator = self._sequential() if self.mode == "sequential" else self._side_by_side()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise RuntimeError("call iter(combined_loader) first")
        return next(self._iterator)

    def reset(self) -> None:
        """Forget the iteration under way and end the loaders' persistent workers."""
        self._iterator = None
        for loader in self._flattened:
            if getattr(loader, "_iterator", None) is not None:
                loader._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None, "rebuild": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self.rebuild = flatten(self._iterables)[1]

    def _sequential(self) -> Iterator[tuple[Any, int, int]]:
        limits = self._limits or [math.inf] * len(self._flattened)
        first = next((number for number, limit in enumerate(limits) if limit > 0), None)
        opened = iter(self._flattened[first]) if first is not None else None  # its workers start now, others' later
        return self._iterate_sequential(limits, first, opened)

    def _iterate_sequential(
        self, limits: list[Count], first: int | None, opened: Iterator[Any] | None
    ) -> Iterator[tuple[Any, int, int]]:
        for number, (loader, limit) in enumerate(zip(self._flattened, limits, strict=True)):
            if limit > 0:
                batches = opened if opened is not None and number == first else iter(loader)
                for index, batch in enumerate(islice(batches, None if limit == math.inf else int(limit))):
                    yield batch, index, number

    def _side_by_side(self) -> Iterator[tuple[Any, int, int]]:
        def reader(loader: Any) -> Callable[[int, int], Iterator[Any]]:
            return lambda cycle, batch: islice(iter(loader), batch, None) if batch else iter(loader)

        limits = self._limits or [math.inf] * len(self._flattened)
        cursors = [Cursor(reader(loader), limit) for loader, limit in zip(self._flattened, limits, strict=True)]
        rows = side_by_side(cursors, self.mode)
        return ((self.rebuild(row), index, 0) for index, row in enumerate(rows))


class Cursor:
    """Position in a loader that may be read several times: cycle and batch."""

    def __init__(
        self, read: Callable[[int, int], Iterator[Any]], limit: Count = math.inf, cycle: int = 0, batch: int = 0
    ) -> None:
        self.read, self.limit = read, limit
        self.cycle, self.batch = cycle, batch
        self.ended = False
        self.iterator = read(cycle, batch)

    def next(self) -> Any:
        """Return the next batch of this cycle, or `_END`."""
        if self.ended:
            return _END
        item = next(self.iterator, _END) if self.batch < self.limit else _END
        if item is _END:
            self.ended = True
        else:
            self.batch += 1
        return item

    def restart(self) -> None:
        """Start the next cycle."""
        self.cycle, self.batch, self.ended = self.cycle + 1, 0, False
        self.iterator = self.read(self.cycle, 0)


def side_by_side(cursors: Sequence[Cursor], mode: Mode) -> Iterator[list[Any]]:
    """Yield a batch from each cursor at a time, by the rule of `mode` (any but ``sequential``)."""
    while cursors:
        row = []
        for cursor in cursors:
            item = cursor.next()
            if item is _END and mode == "min_size":
                return
            if item is _END and mode == "max_size_cycle":
                if all(other.cycle or other.ended for other in cursors):
                    return
                cursor.restart()
                item = cursor.next()
                if item is _END:
                    return  # nothing to cycle through
            row.append(None if item is _END else item)
        if all(cursor.ended for cursor in cursors):
            return
        yield row


def combined_length(mode: Mode, lengths: Sequence[Count], limits: Sequence[Count] | None = None) -> Count:
    """Count the rows of loaders with these `lengths`, of which at most `limits` are read.

    An empty one cannot be cycled: with ``max_size_cycle`` there are no rows then.
    """
    kept = [min(pair) for pair in zip(lengths, limits or lengths, strict=True)]
    if not kept or (mode == "max_size_cycle" and 0 in kept):
        return 0
    return sum(kept) if mode == "sequential" else min(kept) if mode == "min_size" else max(kept)


def length_of(loader: Any) -> Count:
    """Return ``len(loader)``; infinity if it has none or cannot say."""
    try:
        length: int = len(loader)
    except (TypeError, NotImplementedError):
        return math.inf
    return length


def flatten(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of a tree of containers, and a function that rebuilds it from others."""
    leaves: list[Any] = []
    rebuild = _walk(tree, leaves)
    return leaves, rebuild


def _walk(tree: Any, leaves: list[Any]) -> Callable[[Sequence[Any]], Any]:
    children = _children(tree)
    if children is None:
        place = len(leaves)
        leaves.append(tree)
        return lambda values: values[place]
    builders = {key: _walk(child, leaves) for key, child in children.items()}
    return lambda values: _rebuilt(tree, {key: build(values) for key, build in builders.items()})


def _children(tree: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, index or field; None for a leaf."""
    if isinstance(tree, dict):
        children = dict(tree)
    elif type(tree) in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        children = dict(enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "__iter__"):
        children = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    else:
        return None
    plain = children and all(isinstance(child, (int, float, str)) for child in children.values())
    return None if plain else children


def _rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    if isinstance(tree, dict):
        mapping = copy.copy(tree)  # for its type and its default factory
        mapping.update(children)
        return mapping
    if isinstance(tree, (list, tuple)):
        values = list(children.values())
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return dataclasses.replace(tree, **children)


def is_loader(item: Any) -> bool:
    """Return True if `item` yields batches, rather than being a batch or part of one."""
    return hasattr(item, "__iter__") and not isinstance(item, (list, tuple, Mapping, str, bytes, torch.Tensor))


def holds_loaders(source: Any) -> bool:
    """Return True for a non-empty tree of loaders; not for one loader, nor a list of batches."""
    if isinstance(source, dict):
        parts: Any = source.values()
    elif isinstance(source, (list, tuple)):
        parts = source
    elif dataclasses.is_dataclass(source) and not isinstance(source, type) and not is_loader(source):
        parts = [getattr(source, field.name) for field in dataclasses.fields(source)]
    else:
        return False
    kinds = {type(part): part for part in parts}.values()  # one of each: lists of batches can be long
    return bool(kinds) and all(_reads_as_loader(kind) or holds_loaders(kind) for kind in kinds)


def _reads_as_loader(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return bool(part) and all(isinstance(item, (int, float, str)) for item in part)
    return is_loader(part) and not hasattr(part, "__array__")


_SNAPSHOTS = 4  # as many as a ResumableLoader keeps states of


class ResumableCombination:
    """Resumable rows of a `CombinedLoader`, by epoch and position.

    combined: of any mode but ``sequential``. parts: a resumable loader for each of ``combined.flattened``.

    If every part can be reached at any batch at once, so can the combination. Else it records the parts' positions
    after its newest rows (see `state_dict`); without such a state the parts are read up to the position.
    Raises ValueError for the ``sequential`` mode, whose parts are read one by one.
    """

    def __init__(self, combined: CombinedLoader, parts: Sequence[ResumableLoader]) -> None:
        if combined.mode == "sequential":
            raise ValueError(
                '`FitLoop` does not support `CombinedLoader(mode="sequential")`: training needs one stream'
            )
        self.mode, self.combined = combined.mode, combined
        self.parts = list(parts)
        self.limits: list[Count] | None = None
        self._places: deque[tuple[int, int, list[tuple[int, int]]]] = deque(maxlen=_SNAPSHOTS)
        self._pending: dict[str, Any] | None = None

    @property
    def seeds(self) -> list[int]:
        """Seeds of the parts."""
        return [part.seed for part in self.parts]

    @property
    def sized(self) -> bool:
        """Return True if the number of rows is known before they are read."""
        return self.count() != math.inf

    def __len__(self) -> int:
        """Return the rows of an epoch on this rank; raises TypeError if that is unknown."""
        count = self.count()
        if count == math.inf:
            raise TypeError(f"not all of the {len(self.parts)} combined loaders have a length")
        return int(count)

    def count(self) -> Count:
        """Count the rows of an epoch within the limits; infinity if that is unknown."""
        return combined_length(self.mode, self._lengths(), self.limits)

    def batches(self, epoch: int, start: int = 0, *, cycle: int = 0, seed_epoch: int | None = None) -> Iterator[Any]:
        """Yield rows ``start, start + 1, ...`` of the epoch, each in the combined tree's shape."""
        pending, self._pending = self._pending, None
        readers: list[Callable[[int, int], Iterator[Any]]] = [
            partial(_read, part, epoch, seed_epoch) for part in self.parts
        ]
        skip, limits = 0, self.limits or [math.inf] * len(self.parts)
        if pending is not None and (pending["epoch"], pending["batch"]) == (epoch, start):
            for part, state in zip(self.parts, pending["states"], strict=True):
                part.load_state_dict(state)
            places = [(int(c), int(b)) for c, b in pending["places"]]
        elif all(part.positioned for part in self.parts):
            places = [self._place(min(pair), start) for pair in zip(self._lengths(), limits, strict=True)]
        else:
            places, skip = [(0, 0)] * len(self.parts), start
        cursors = [Cursor(read, limit, *place) for read, limit, place in zip(readers, limits, places, strict=True)]
        return self._rows(cursors, epoch, start, skip)

    def _rows(self, cursors: list[Cursor], epoch: int, start: int, skip: int) -> Iterator[Any]:
        rebuild, keep = self.combined.rebuild, not all(part.positioned for part in self.parts)
        count = self.count()
        total = None if count == math.inf else max(0, int(count) - start + skip)
        for number, row in enumerate(islice(side_by_side(cursors, self.mode), total), start - skip + 1):
            if keep:
                self._places.append((epoch, number, [(cursor.cycle, cursor.batch) for cursor in cursors]))
            if number > start:
                yield rebuild(row)

    def samples_before(self, epoch: int, batch: int) -> int | None:
        """Return None: parts of different lengths and batch sizes have no common order."""

    def seek(self, epoch: int, place: int) -> int | None:
        """Return None, see `samples_before`."""

    def state_dict(self, batch: int | None = None, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the parts' positions after `batch` rows of `epoch` (default: the newest).

        Empty if no state is needed. Raises ValueError for a row more than three back.
        """
        if not self._places:
            return dict(self._pending or {})
        if batch is None:
            epoch, batch, _ = self._places[-1]
        if batch == 0:
            states = [part.state_dict(0, epoch=epoch) for part in self.parts]
            return (
                {"epoch": epoch, "batch": 0, "places": [[0, 0]] * len(states), "states": states} if any(states) else {}
            )
        for known_epoch, number, places in reversed(self._places):
            if number == batch and epoch in (None, known_epoch):
                states = [
                    part.state_dict(position, epoch=known_epoch, cycle=cycle)
                    for part, (cycle, position) in zip(self.parts, places, strict=True)
                ]
                return {"epoch": known_epoch, "batch": number, "places": [list(p) for p in places], "states": states}
        raise ValueError(f"where the parts stood after batch {batch} is no longer known")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`, for the next `batches` call at that position."""
        self._pending = dict(state) or None
        self._places.clear()

    def close(self) -> None:
        """End the workers of all parts. The next `batches` starts others."""
        for part in self.parts:
            part.close()

    def _lengths(self) -> list[Count]:
        return [len(part) if part.sized else math.inf for part in self.parts]

    def _place(self, length: Count, start: int) -> tuple[int, int]:
        """Return cycle and position of a part at row `start`."""
        if self.mode != "max_size_cycle" or length in (0, math.inf):
            return 0, start
        return divmod(start, int(length))


def _read(part: ResumableLoader, epoch: int, seed_epoch: int | None, cycle: int, start: int) -> Iterator[Any]:
    return part.batches(epoch, start, cycle=cycle, seed_epoch=seed_epoch)
