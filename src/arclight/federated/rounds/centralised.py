"""What a federated run can begin with: weights, step count and optimizer states of a centralised one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from arclight import checkpoint
from arclight.checkpoint.remote import place
from arclight.federated.errors import FederatedError


def steps_of(path: str | Path) -> int:
    """Optimizer steps behind a checkpoint's weights; 0 where it does not say."""
    return (checkpoint.inspect(path).step or 0) if place(path).is_dir() else 0


def moments_of(path: str | Path, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Optimizer states (``exp_avg``) of a trainer's checkpoint by ``<kind>/<parameter name>``; none where it keeps no optimizers.

    Raises FederatedError where it keeps optimizers that do not say which parameter a state is of, or have none of a kind.
    """
    if not kinds or not place(path).is_dir() or "optimizers" not in checkpoint.inspect(path).entries:
        return {}
    optimizers: list[dict[str, Any]] = checkpoint.load(path, only=["optimizers"])["optimizers"]
    found: dict[str, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer["param_groups"]:
            if len(group.get("param_names", ())) != len(group["params"]):
                raise FederatedError(f"the optimizers in {path} do not name their parameters: begin without moments")
            for number, name in zip(group["params"], group["param_names"], strict=True):
                entries = optimizer["state"].get(number, {})
                found |= {
                    f"{kind}/{name}": entries[kind] for kind in kinds if isinstance(entries.get(kind), torch.Tensor)
                }
    for kind in kinds:
        if not any(key.startswith(f"{kind}/") for key in found):
            raise FederatedError(f"no optimizer in {path} keeps {kind!r}: average only states that the optimizer has")
    return found
