"""Key optimizer states by parameter name, so that they load under any sharding of a model.

An optimizer numbers its parameters. Numbers mean nothing to processes that hold different parameters, as a pipeline's stages do.
The names are in the groups as ``param_names``, as in torch; if processes' parameters differ, ``params`` and ``state`` are keyed by name
altogether, as in ``torch.distributed.checkpoint.state_dict``.

``strategies.base``, ``strategies.sharded`` and ``trainer.checkpoint`` (`state`, `named_state`) call this when optimizer states are saved
and loaded. Both forms, and ``param_names``, are in saved checkpoints and stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Names = Mapping[torch.Tensor, str]


def name_parameters(modules: Iterable[nn.Module]) -> dict[torch.Tensor, str]:
    """Map all parameters of ``modules`` to their names.

    Parameters that two modules name differently, or that share a name, are left out.
    """
    found: dict[torch.Tensor, str] = {}
    unclear: set[torch.Tensor] = set()
    taken: dict[str, torch.Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if found.setdefault(parameter, name) != name or taken.setdefault(name, parameter) is not parameter:
                unclear |= {parameter, taken[name]}
    return {parameter: name for parameter, name in found.items() if parameter not in unclear}


def add_parameter_names(optimizer: Optimizer, state: dict[str, Any], names: Names) -> dict[str, Any]:
    """Add parameter names to a ``state_dict`` of ``optimizer``.

    Returns it unchanged if it is keyed by name, or if a parameter has no name.
    """
    groups = optimizer.param_groups
    if _is_by_name(state) or not all(parameter in names for group in groups for parameter in group["params"]):
        return state
    named = [
        {**saved, "param_names": [names[parameter] for parameter in group["params"]]}
        for saved, group in zip(state["param_groups"], groups, strict=True)
    ]
    return {**state, "param_groups": named}


def key_by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Key an optimizer's state by the names that :func:`add_parameter_names` added.

    Raises ValueError for a parameter without one.
    """
    if _is_by_name(state):
        return state
    numbered: dict[Any, str] = {}
    for group in state["param_groups"]:
        if "param_names" not in group:
            raise ValueError(
                "processes hold different parameters, so an optimizer's state must be kept by name; not all of its parameters "
                "are parameters of the module that is saved with it"
            )
        numbered |= dict(zip(group["params"], group["param_names"], strict=True))
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} | {"params": group["param_names"]}
        for group in state["param_groups"]
    ]
    return {
        **state,
        "state": {numbered[number]: entries for number, entries in state["state"].items()},
        "param_groups": groups,
    }


def select_optimizer_state(optimizer: Optimizer, state: dict[str, Any], names: Names) -> dict[str, Any]:
    """Select the part of a saved state that belongs to ``optimizer``, keyed by its own numbers.

    Parameters are found by name if the state has a name for each of the optimizer's, else by number. A state of an optimizer that loads by
    name itself (``knows_names``) is returned unchanged. Raises ValueError for a state that is keyed by name and lacks a parameter of the
    optimizer.
    """
    saved = state.get("param_groups")
    if not isinstance(saved, list) or getattr(optimizer, "knows_names", False):
        return state
    only_names = _is_by_name(state)
    own = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    keys: dict[str, Any] = {}
    home: dict[str, int] = {}
    for number, group in enumerate(saved):
        for key, name in zip(
            group["params"], group["params"] if only_names else group.get("param_names", ()), strict=False
        ):
            keys[name], home[name] = key, number
    missing = [name for name in itertools.chain.from_iterable(own) if name not in keys]
    if missing and only_names:
        what = (
            f"{missing[0]}, which is not in it"
            if missing[0]
            else "a parameter whose name is not known: load its module too"
        )
        raise ValueError(f"the checkpoint keeps this optimizer's state by name, and the optimizer has {what}")
    if missing or len(own) != len(saved):
        return {**state, "param_groups": [_nameless(group) for group in saved]}  # torch says what does not fit
    entries, groups, count = {}, [], 0
    for number, members in enumerate(own):
        source = saved[home[members[0]]] if members and members[0] is not None else saved[number]
        groups.append({**_nameless(source), "params": list(range(count, count + len(members)))})
        for name in members:
            assert name is not None
            if keys[name] in state["state"]:
                entries[count] = state["state"][keys[name]]
            count += 1
    return {**state, "state": entries, "param_groups": groups}


def _is_by_name(state: dict[str, Any]) -> bool:
    return any(isinstance(number, str) for group in state["param_groups"] for number in group["params"])


def _nameless(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "param_names"}
