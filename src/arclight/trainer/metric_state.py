"""What a metric has gathered, for a checkpoint in the middle of an epoch. Metrics are torchmetrics', or shaped like them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from arclight.trainer.module import Module


def metric_state(metric: Any) -> dict[str, Any] | None:
    """The states of ``metric`` and of the metrics inside it, on the host; None for one that does not say what its state is."""
    parts = dict(_with_states(metric))
    if parts:
        return {
            "parts": {
                path: {name: _to_host(value) for name, value in states.items()} for path, states in parts.items()
            },
            "updates": {path: getattr(_part(metric, path), "_update_count", 0) for path in parts},
        }
    if callable(getattr(metric, "state_dict", None)) and callable(getattr(metric, "load_state_dict", None)):
        return {"state_dict": {name: _to_host(value) for name, value in metric.state_dict().items()}}
    return None


def restore_metric(module: Module, path: str, state: dict[str, Any] | None) -> Any:
    """The metric that ``module`` holds at ``path``, with ``state`` put back; None where there is none any more."""
    try:
        metric = _part(module, path)
    except AttributeError:
        metric, state = None, None
    if state is None:
        rank_zero_warn(
            f"the metric {path} of {type(module).__name__} cannot be restored and starts its epoch afresh: "
            + ("there is no such attribute" if metric is None else "give it state_dict() and load_state_dict()")
        )
    elif "state_dict" in state:
        metric.load_state_dict(state["state_dict"])
    else:
        for inner, states in state["parts"].items():
            part = _part(metric, inner)
            for name, value in states.items():
                setattr(part, name, _like(value, getattr(part, name), part))
            part._update_count, part._computed = state["updates"][inner], None
    return metric


def held_metric(module: Module, path: str, name: str) -> Any:
    """Return the metric that ``module`` holds at ``path``, to take part in what others logged as ``name``.

    Raises MisconfigurationError where it holds none.
    """
    try:
        return _part(module, path)
    except AttributeError:
        raise MisconfigurationError(
            f"the metric {name!r} is logged on other processes, and computes over all of them, but {type(module).__name__} has no "
            f"attribute {path!r} on this one: log it on all, or with rank_zero_only=True"
        ) from None


def _with_states(metric: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and states of ``metric`` and of each metric inside it that has states, as torchmetrics names them."""
    parts = metric.named_modules() if isinstance(metric, nn.Module) else [("", metric)]
    for path, part in parts:
        states = getattr(part, "metric_state", None)
        if isinstance(states, dict) and states:
            yield path, states


def _part(owner: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        owner = owner[int(name)] if isinstance(owner, nn.ModuleList) else getattr(owner, name)
    return owner


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return [_to_host(item) for item in value] if isinstance(value, (list, tuple)) else value


def _like(value: Any, present: Any, metric: Any) -> Any:
    """``value`` on the device where ``metric`` works."""
    device = present.device if isinstance(present, torch.Tensor) else getattr(metric, "device", None)
    if isinstance(value, list):
        return [_like(item, None, metric) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
