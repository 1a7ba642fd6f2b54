"""Tensors that may be spread over processes, seen from one of them. Imports nothing of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_spread(tensor: object) -> bool:
    """Whether ``tensor`` is one of which this process holds a part only (a DTensor)."""
    return hasattr(tensor, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this process's part of ``tensor``; all of it where it is not spread."""
    part: torch.Tensor = tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[attr-defined]
    return part


def own_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`own_part` of each, for what is done element by element."""
    return [own_part(tensor) for tensor in tensors]
