"""Put an optimizer's saved state back."""

from __future__ import annotations

from typing import Any

import torch


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``, with every tensor in the memory layout of its parameter.

    Fused optimizers walk parameter, gradient and moments as flat memory. Moments that come back from a file are
    contiguous; beside a ``channels_last`` weight each would be applied to another element, without an error.
    """
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
