"""Take this rank's shards of DTensors, without importing torch.distributed.

Optimizers, checkpoints, pipelines and monitors work on shards through these. Plain tensors are returned unchanged, so that callers need no
case of their own: keep that, and the import cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor, of which this process may hold a part only."""
    return hasattr(tensor, "to_local")


def is_sharded(module: torch.nn.Module) -> bool:
    """Return True if any parameter of ``module`` is a DTensor."""
    return any(map(is_dtensor, module.parameters()))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of ``tensor``, sharing memory; a plain tensor itself."""
    part: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_tensor` of each, for element-wise operations."""
    return [local_tensor(tensor) for tensor in tensors]
