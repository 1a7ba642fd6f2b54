"""Parameter groups: which weights decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def decay_groups(parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: those of two or more dimensions decay, biases and normalisation do not."""
    trainable = [p for _, p in parameters if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    kept = [group for group in groups if group["params"]]
    if not kept:
        raise ValueError("no parameter requires gradients; is everything frozen?")
    return kept


def make_optimizer(name: str, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Torch's optimizer ``name`` over ``groups``, with its fused kernel where the device has one."""
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, fused=True, **options)
    return optimizer
