"""How new modules come into being: in which contexts, without first values, or at first without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class NoInit(torch.overrides.TorchFunctionMode):
    """Leaves out the functions of ``torch.nn.init``: weights stay as allocated, to be loaded right after."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def entered(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """One context for several, entered in their order when it is entered itself."""

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    return enter()


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Memory and first values for what of ``module`` is on the meta device."""
    if any(parameter.is_meta for parameter in module.parameters()):
        from arclight.fabric.sharding import materialize

        materialize(module, device)
