"""Parameters that several modules share under different names."""

from __future__ import annotations

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Names of each parameter that has more than one, in the order in which the module lists them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [same for same in names.values() if len(same) > 1]


def set_shared_parameters(module: nn.Module, shared: list[list[str]]) -> nn.Module:
    """Tie again what :func:`find_shared_parameters` found: each group's names get the first one's parameter."""
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module
