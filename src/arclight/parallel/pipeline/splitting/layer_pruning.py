"""Cut a stage out of a model by deleting the layers of other stages; names stay the same.

`install` prunes with it, `planning.pp_layout` predicts by the same `assign_layers`, `PlanStrategy` asks `is_prunable` first; other models
are sliced (`sliced_module`). Planner and run must assign alike. It relies on the names ``layers``, ``norm`` and ``output`` of `Decoder`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from arclight.parallel.pipeline.cost.partition import partition
from arclight.parallel.pipeline.unit_costs import UnitCost
from arclight.parallel.plan import PlanError

LAYERS, LAST = "layers", ("norm", "output")
"""Attribute of a model's blocks, and the modules after them; all others come before."""


@dataclass(frozen=True)
class StageLayers:
    """Parts of a model that one stage has: members of ``layers``, and other children."""

    layers: tuple[str, ...]
    others: tuple[str, ...]


def assign_layers(model: nn.Module, stages: int) -> list[StageLayers]:
    """Assign the parts of ``model`` to stages, so that the slowest computes least.

    Nothing is changed. The model has its blocks in a ModuleDict ``layers``, keyed by names that stay, and computes
    without any of its children that is None. A layer counts with its parameters, the output too; embeddings are looked
    up and count nothing. Raises PlanError for a model that cannot be cut so.
    """
    layers = getattr(model, LAYERS, None)
    if not isinstance(layers, nn.ModuleDict):
        raise PlanError(
            f"{type(model).__name__} has no ModuleDict `{LAYERS}` to cut into stages: use pp = 1, or build it as a Decoder"
        )
    loose = [name for name, _ in model.named_parameters(recurse=False)]
    if loose:
        raise PlanError(
            f"{type(model).__name__}.{loose[0]} is a parameter of the model itself, which belongs to no stage: put it into a submodule"
        )
    if (repeats := getattr(getattr(model, "config", None), "repeats", 1)) > 1:
        raise PlanError(
            f"the blocks of {type(model).__name__} run {repeats} times with the same weights, and {stages} stages would cut that: use pp = 1"
        )
    refuse_tied(model)
    others = [name for name, child in model.named_children() if name != LAYERS and child is not None]
    before = tuple(name for name in others if name not in LAST)
    after = tuple(name for name in others if name in LAST)
    names = list(layers)
    if len(names) < stages:
        raise PlanError(f"{len(names)} layers are too few for {stages} stages: use a plan with {len(names)} or less")
    costs = [_cost(layers[name]) for name in names]
    costs[-1] += sum(_cost(getattr(model, name)) for name in after)  # so that the last stage has a layer too
    begins = partition([UnitCost(cost, cost, cost) for cost in costs], stages, 2 * stages).cuts
    cuts = []
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], len(names)], strict=True)):
        own = (before if number == 0 else ()) + (after if number == stages - 1 else ())
        cuts.append(StageLayers(tuple(names[begin:end]), own))
    return cuts


def _cost(module: nn.Module) -> float:
    """Return the multiply-adds per token.

    Of a mixture's parameters the ``active_share`` counts, which one token uses.
    """
    return sum(
        parameter.numel() * float(getattr(part, "active_share", 1.0))
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
    )


def is_prunable(model: nn.Module) -> bool:
    """Return True for a model none of whose parts share a parameter.

    If some do, stages are sliced, which sums its gradients.
    """
    try:
        refuse_tied(model)
    except PlanError:
        return False
    return True


def refuse_tied(model: nn.Module) -> None:
    """Raise PlanError for a parameter that several children of the model (or layer) use.

    Stages would train copies of it.
    """
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    for names in users.values():
        units = {tuple(name.split(".")[: 2 if name.startswith(f"{LAYERS}.") else 1]) for name in names}
        if len(units) > 1:
            raise PlanError(
                f"{names[0]} and {names[1]} are one parameter, which stages of a pipeline would train independently: build the model with "
                "tied = false, or use pp = 1"
            )


def prune(model: nn.Module, cuts: Sequence[StageLayers]) -> None:
    """Delete from ``model``, in place, what none of ``cuts`` has.

    They are layers, and other children, which become None.
    """
    layers = getattr(model, LAYERS)
    for name in list(layers):
        if not any(name in cut.layers for cut in cuts):
            del layers[name]
    for name, _ in list(model.named_children()):
        if name != LAYERS and not any(name in cut.others for cut in cuts):
            setattr(model, name, None)


def pruned_view(model: nn.Module, cut: StageLayers) -> nn.Module:
    """Return a view of ``model`` that has the layers of ``cut``, sharing submodules.

    They are below a copy of the outermost module.
    """
    part = copy.copy(model)
    state: dict[str, Any] = part.__dict__
    for name, value in list(state.items()):
        if isinstance(value, (dict, OrderedDict)):
            state[name] = copy.copy(value)  # modules, and hooks that are put on it later
    layers = getattr(model, LAYERS)
    part._modules[LAYERS] = nn.ModuleDict({name: layers[name] for name in cut.layers})
    prune(part, [cut])
    return part
