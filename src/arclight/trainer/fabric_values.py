"""Numbers to tensors for collectives, tensors to numbers for loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def as_tensors(data: Any, device: torch.device) -> Any:
    """``data`` with its numbers, booleans and arrays as tensors on ``device``; tensors and all else as they are."""
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
    """``metrics`` with each tensor of one element as its number. Raises ValueError for a larger one."""
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
