"""Helpers for DTensors that import nothing of torch.distributed.

Optimizers, checkpoints and monitors work on shards through these. Tensors that are not sharded pass unchanged, so callers need no case of
their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_dtensor(tensor: object) -> bool:
    """Return True if ``tensor`` is one of which this process holds a part only (a DTensor)."""
    return hasattr(tensor, "to_local")


def is_sharded(module: torch.nn.Module) -> bool:
    """Return True if this process holds a part only of any parameter of ``module``."""
    return any(map(is_dtensor, module.parameters()))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this process's shard of ``tensor``; all of it if not sharded."""
    part: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return :func:`local_tensor` of each, for element-wise operations."""
    return [local_tensor(tensor) for tensor in tensors]
