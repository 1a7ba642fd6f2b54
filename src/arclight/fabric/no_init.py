"""Modules whose weights come from a checkpoint need no first values."""

from __future__ import annotations

from typing import Any

import torch


class NoInit(torch.overrides.TorchFunctionMode):
    """Leaves out the functions of ``torch.nn.init``: weights stay as allocated, to be loaded right after."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
