"""Wrap a module whose parts FSDP gathers one by one, so that any step can be its forward.

`FSDPStrategy` and `PlanStrategy` wrap a module in `StepRoot`; pipelines and ``arclight.parallel`` also take the helpers below.
``deploy.quantizing`` derives layers from `FSDPUnit` (gathered as one unit) or `RoundsOwnWeights` (gathered in the stored type). Names in
state dicts are those without the wrapper: checkpoints of all strategies open in each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class StepRoot(nn.Module):
    """Root module around the user's, in which any step can be the forward.

    FSDP shards the root's class, and leaves the user's as it is.
    """

    def __init__(self, module: nn.Module, shared: bool) -> None:
        super().__init__()
        self.module = module
        self.shared = shared

    def forward(self, *arguments: Any, _step: Callable[..., Any] | None = None, **options: Any) -> Any:
        return (self.module if _step is None else _step)(*arguments, **options)


class FSDPUnit(nn.Module):
    """Module whose forward reads its submodules' parameters without calling these.

    So FSDP must gather it as one unit.
    """


class RoundsOwnWeights(nn.Module):
    """Module that rounds its parameters in forward.

    So FSDP must gather them in the type that they are stored in.
    """


def whole_units(module: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    """Return ``chosen`` with modules inside an `FSDPUnit` replaced by that; inner ones first."""
    if isinstance(module, FSDPUnit):
        return []
    for whole in [part for part in module.modules() if isinstance(part, FSDPUnit)]:
        inside = set(whole.modules())
        if any(part in inside for part in chosen):
            first = next(place for place, part in enumerate(chosen) if part in inside)
            chosen = [*chosen[:first], whole, *(part for part in chosen[first:] if part not in inside)]
    return chosen


def outermost_submodules(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that have a forward and parameters."""
    parts: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            parts += outermost_submodules(child)
        elif any(True for _ in child.parameters()):
            parts.append(child)
    return parts


def reshard_without_backward(module: nn.Module, *_: Any) -> None:
    """Reshard after a forward without gradients.

    Full weights that stay would be used after the next update.
    """
    if not torch.is_grad_enabled():
        reshard(module)


def reshard(module: nn.Module) -> None:
    """Reshard the full weights that FSDP has gathered for ``module`` and all below it."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def sum_on_gloo(module: nn.Module) -> None:
    """Let FSDP sum and divide if gloo is the backend, which has no averaging reductions."""
    from torch.distributed.fsdp import FSDPModule

    if torch.distributed.get_backend() == "gloo":
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
