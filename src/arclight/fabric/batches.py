"""Batches are trees of tensors: walk them, move them, count their samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``batch`` with ``function`` applied to every tensor; containers keep their types, other leaves stay.

    An object with a ``to`` method of its own (a packed sequence, say) is a leaf that is left to :func:`move_batch`.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuild_mapping(batch, items)
    if isinstance(batch, tuple):
        parts = [map_tensors(value, function) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [map_tensors(value, function) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch,
            **{f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch) if f.init},
        )
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    factory = getattr(batch, "default_factory", None)
    return type(batch)(factory, items) if factory is not None else type(batch)(items)  # type: ignore[call-arg]


def move_batch(batch: Any, device: torch.device) -> Any:
    """``batch`` on ``device``; copies from pinned memory do not wait."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)) and hasattr(batch, "to"):
        return batch.to(device)
    return map_tensors(batch, move)


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, 1 where there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        values: Any = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    else:
        return 1
    for value in values:
        if isinstance(value, (torch.Tensor, Mapping, tuple, list)):
            return batch_size_of(value)
    return len(batch) if isinstance(batch, list) and batch else 1
