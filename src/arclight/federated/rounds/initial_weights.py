"""Read a run's initial weights: of a module, or of a centralised run with optimizer states.

`Server` reads the first round by it: a module or a checkpoint comes in, entries about the module (`writer.MODULE_ENTRIES`) and optimizer states by
``<kind>/<parameter name>`` go out. Those names are in rounds and stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arclight import checkpoint
from arclight.checkpoint import tree
from arclight.checkpoint.remote import to_path
from arclight.federated.errors import FederatedError
from arclight.federated.rounds.writer import CARRIED_ENTRIES
from arclight.trainer.checkpoint.named_state import named_tensors
from arclight.trainer.hparams import HyperparametersMixin, checkpoint_entries

log = logging.getLogger(__name__)

_STATISTICS = ("running_mean", "running_var")
"""Names of running statistics in torch's normalisation layers."""


def entries_of(module: nn.Module) -> dict[str, Any]:
    """Return the entries of a module that rounds carry; see `writer.MODULE_ENTRIES`."""
    parameters = dict(module.named_parameters())
    found: dict[str, Any] = {"buffers": sorted(name for name in named_tensors(module) if name not in parameters)}
    if not isinstance(module, HyperparametersMixin):
        return found
    about = checkpoint_entries(module)
    if tree.encode(about).files:
        log.warning(
            "rounds do not say with what %s is built, as tensors are among its hyper-parameters", type(module).__name__
        )
        return found
    return found | about


def entries_in(path: str | Path) -> dict[str, Any]:
    """Return the entries of a checkpoint that rounds carry, as far as it has them.

    See `writer.CARRIED_ENTRIES`.
    """
    if not to_path(path).is_dir():
        return {}
    there = checkpoint.inspect(path).entries
    return checkpoint.load(path, only=[name for name in CARRIED_ENTRIES if name in there])


def statistics(names: Iterable[str]) -> list[str]:
    """Return the names that belong to normalisation statistics, guessed without a module."""
    return sorted(name for name in names if name.rpartition(".")[2] in _STATISTICS)


def steps_of(path: str | Path) -> int:
    """Return the optimizer steps behind a checkpoint's weights; 0 if it does not say."""
    return (checkpoint.inspect(path).step or 0) if to_path(path).is_dir() else 0


def moments_of(path: str | Path, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's optimizer states by ``<kind>/<parameter name>``.

    ``kinds``: such as ``exp_avg``. Empty for a checkpoint without optimizers. Raises FederatedError if it keeps
    optimizers that do not say which parameter a state is of, or have none of a kind.
    """
    if not kinds or not to_path(path).is_dir() or "optimizers" not in checkpoint.inspect(path).entries:
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
