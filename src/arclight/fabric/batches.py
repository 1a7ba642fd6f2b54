"""Walk batches as trees of tensors: map, move to a device, slice, split, count samples.

Fabric, the Trainer, strategies, precision plugins, pipelines and federated clients call this with whatever a loader yields. `map_tensors`
and `slice_batch` keep mappings, named tuples and dataclasses of users' own classes (other subclasses of list and tuple become these). A
packed sequence is one leaf of several tensors, whose batch sizes stay on the CPU. Counts of samples weight logged means and throughput; how
a batch is split decides the micro-batches of seeded runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``function`` to every tensor of ``batch``, in containers like those of ``batch``.

    Other leaves are kept, and so are the batch sizes of a `PackedSequence`, which torch wants on the CPU.
    """
    return _map(batch, function, None)


def _map(batch: Any, function: Callable[[torch.Tensor], torch.Tensor], move_object: Callable[[Any], Any] | None) -> Any:
    """Map tensors by ``function``, objects with a ``to`` of their own by ``move_object``."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if move_object is not None and callable(getattr(type(batch), "to", None)):
        return move_object(batch)
    if isinstance(batch, Mapping):
        items = {key: _map(value, function, move_object) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuild_mapping(batch, items)
    if isinstance(batch, tuple):
        kept = {1} if isinstance(batch, PackedSequence) else ()  # data, batch sizes, indices
        parts = [value if i in kept else _map(value, function, move_object) for i, value in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [_map(value, function, move_object) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch,
            **{
                f.name: _map(getattr(batch, f.name), function, move_object) for f in dataclasses.fields(batch) if f.init
            },
        )
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    factory = getattr(batch, "default_factory", None)
    return type(batch)(factory, items) if factory is not None else type(batch)(items)  # type: ignore[call-arg]


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` on ``device``; copies from pinned memory do not wait.

    Whatever has a ``to`` method, at any depth, is moved by that: a `PackedSequence`, a tokenizer's encoding, a class of the user's own.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def move_object(thing: Any) -> Any:
        kind: Any = type(thing)
        moved = thing.to(device, non_blocking=True) if _takes_non_blocking(kind) else thing.to(device)
        return thing if moved is None else moved  # many a ``to`` of users' own works in place and gives nothing back

    return _map(batch, move, move_object)


@functools.cache
def _takes_non_blocking(kind: Any) -> bool:
    own = kind.to
    return kind is PackedSequence or (inspect.isfunction(own) and "non_blocking" in inspect.signature(own).parameters)


def batch_size_of(batch: Any) -> int:
    """Return a batch's number of samples: the first of `batch_sizes`, else 1."""
    first = _first(batch)
    if isinstance(first, torch.Tensor):  # nearly every batch
        return first.shape[0] if first.ndim else 1
    return next(batch_sizes(batch), 1)


def _first(batch: Any) -> Any:
    if isinstance(batch, PackedSequence):  # a tuple, but of one value's parts
        return batch
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def slice_batch(batch: Any, start: int, stop: int, size: int) -> Any:
    """Slice samples ``start`` to ``stop`` out of a batch of ``size``.

    Every tensor with that first dimension is sliced, and lists with one entry and packed sequences with one sequence for each sample. All
    else stays whole, in containers like those of ``batch``.
    """
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.ndim and batch.shape[0] == size else batch
    if isinstance(batch, PackedSequence):
        if int(batch.batch_sizes[0]) != size:
            return batch
        return pack_sequence(unpack_sequence(batch)[start:stop], enforce_sorted=batch.sorted_indices is None)
    if isinstance(batch, Mapping):
        items = {key: slice_batch(value, start, stop, size) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuild_mapping(batch, items)
    if isinstance(batch, list) and len(batch) == size and size not in batch_sizes(batch[0]):
        return batch[start:stop]
    if isinstance(batch, tuple):
        parts = [slice_batch(value, start, stop, size) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [slice_batch(value, start, stop, size) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        changed = {name: slice_batch(getattr(batch, name), start, stop, size) for name in fields}
        return dataclasses.replace(batch, **changed)
    return batch


def split_batch(module: Any, batch: Any, size: int, count: int) -> Iterator[tuple[Any, int]]:
    """Split a batch of ``size`` samples into ``count`` even parts, and yield each with its size.

    A module cuts its own if it has ``part_of_batch(batch, start, stop)``; otherwise :func:`slice_batch` does.
    """
    if count <= 1:
        yield batch, size
        return
    own = getattr(module, "part_of_batch", None)
    for start, stop in pairwise(size * number // count for number in range(count + 1)):
        yield slice_batch(batch, start, stop, size) if own is None else own(batch, start, stop), stop - start


def count_samples_and_tokens(batch: Any) -> tuple[int, int]:
    """Count samples and tokens in a batch.

    Tokens are those of its first tensor, or of ``input_ids`` or ``tokens``, if that is (B, T) of integers; else 0.
    """
    first = _first(batch)
    if isinstance(first, Mapping):
        first = first.get("input_ids", first.get("tokens", first))
    if isinstance(first, torch.Tensor) and first.ndim:
        ids = first.ndim == 2 and not first.is_floating_point()
        return first.shape[0], first.numel() if ids else 0
    return next(batch_sizes(batch), 1), 0


def batch_sizes(batch: Any) -> Iterator[int]:
    """Yield the first dimension of each tensor or array in a batch; 1 if it has none.

    A packed sequence yields its number of sequences. A list without tensors is a batch of what is in it: its length is yielded.
    """
    if isinstance(batch, PackedSequence):
        yield int(batch.batch_sizes[0])
        return
    if isinstance(batch, torch.Tensor) or (hasattr(batch, "shape") and hasattr(batch, "ndim")):
        yield int(batch.shape[0]) if batch.ndim else 1
        return
    found = False
    for part in _parts(batch):
        for size in batch_sizes(part):
            found = True
            yield size
    if not found and isinstance(batch, list) and batch:
        yield len(batch)


def _parts(batch: Any) -> Iterable[Any]:
    """Return the items of a batch that is not a tensor."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (tuple, list)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, Iterable) and not isinstance(batch, (str, bytes, Iterator)):
        return batch
    return ()


def as_tensors(data: Any, device: torch.device) -> Any:
    """Convert numbers, booleans and arrays in ``data`` to tensors on ``device``.

    Tensors are moved there, mappings become dicts; other leaves stay as they are. Raises TypeError for a `PackedSequence`: this is for what
    is gathered or reduced over ranks, whose sequences differ in length.
    """
    if isinstance(data, PackedSequence):
        raise TypeError(
            "a PackedSequence cannot be gathered or reduced over ranks, since its layout is that of one rank's lengths: pad it first, by "
            "torch.nn.utils.rnn.pad_packed_sequence, to a length that all ranks share"
        )
    if isinstance(data, (bool, int, float, complex, np.generic)):
        return torch.tensor(data.item() if isinstance(data, np.generic) else data, device=device)
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data).to(device)
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(as_tensors(value, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(as_tensors(value, device) for value in data)
    return data


def as_scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with each tensor of one element as its number.

    Raises ValueError for a larger one.
    """
    return {name: _scalar(name, value) for name, value in metrics.items()}


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_scalars(value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"log({name!r}, ...): the value has {value.numel()} elements, so it cannot be converted to a scalar. Log its mean, "
            "or each element under a name of its own"
        )
    return value.item()
