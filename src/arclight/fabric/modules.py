"""Initialise modules on the meta device, switch modes, and find or tie parameters.

The Trainer, tasks, pipelines and ``deploy`` switch modes with `evaluating` and `keeping_modes`, which restore each submodule's own mode.
``strategies.base`` makes large models with `SkipInit` and `materialize_meta`; ``text.hf.read`` ties parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class SkipInit(torch.overrides.TorchFunctionMode):
    """Skip the functions of ``torch.nn.init``, for weights that are loaded afterwards."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def enter_all(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return one context for several, entered in their order when it is entered itself."""

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    return enter()


def materialize_meta(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialise the tensors of ``module`` that are on the meta device."""
    if any(parameter.is_meta for parameter in module.parameters()):
        from arclight.fabric.distributed.sharding import materialize

        materialize(module, device)


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore every module's own mode afterwards; some may be frozen in another one."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set every module to evaluation mode, and restore each one's own mode afterwards."""
    with keeping_modes(model):
        model.eval()
        yield


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """List the names of each parameter that has several, in the module's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [same for same in names.values() if len(same) > 1]


def set_shared_parameters(module: nn.Module, shared: list[list[str]]) -> nn.Module:
    """Tie parameters as :func:`find_shared_parameters` found them."""
    for first, *others in shared:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module
