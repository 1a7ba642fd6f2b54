"""What a user's step or hook takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from arclight.fabric.rank_zero import rank_zero_warn

ITERATOR = "dataloader_iter"


def takes(function: Callable[..., Any], name: str, least: int | None = None) -> bool:
    """Whether `function` has a parameter `name`, or collects positional ones, or has at least `least` of them."""
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    collects = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return name in parameters or collects or (least is not None and len(positional) >= least)


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Whether a step asks for the iterator over batches (a parameter ``dataloader_iter``) in place of a batch."""
    return ITERATOR in inspect.signature(step).parameters


def note_iterator(name: str) -> None:
    """Say once what taking the iterator means."""
    rank_zero_warn(
        f"Found `{ITERATOR}` argument in the `{name}`. Note that the support for this signature is experimental: batches are not "
        "moved to the device, and a step may take several of them"
    )


def check_loader_index(owner: object, name: str, least: int, several: bool, prefix: str) -> None:
    """Raises RuntimeError where ``dataloader_idx`` is missing with several loaders, or must be given with one."""
    function = getattr(owner, name)
    where = f"`{type(owner).__name__}.{name}()`"
    if several and not takes(function, "dataloader_idx", least):
        raise RuntimeError(
            f"You provided multiple `{prefix}_dataloader`, but no `dataloader_idx` argument in {where}. Try adding "
            "`dataloader_idx=0` to its signature."
        )
    parameter = inspect.signature(function).parameters.get("dataloader_idx")
    if not several and parameter is not None and parameter.default is inspect.Parameter.empty:
        raise RuntimeError(
            f"You provided only a single `{prefix}_dataloader`, but have included `dataloader_idx` in {where}. Either remove "
            "the argument or give it a default value i.e. `dataloader_idx=0`."
        )
