"""Modules that went through ``torch.compile``: the compiled object is no Module, and a trainer needs one."""

from __future__ import annotations

from typing import Any

from torch import nn

from arclight.trainer.hooks import overridden
from arclight.trainer.module import Module

_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def _wrapped(model: object) -> nn.Module | None:
    """What ``torch.compile`` was given, where it made ``model``."""
    # Asked by name: the class lives in torch._dynamo, which takes seconds to import.
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else None  # type: ignore[attr-defined]


def from_compiled(model: Any) -> Module:
    """The Module inside what ``torch.compile`` returned, with its forward and its steps compiled in the same way.

    The module itself is changed; :func:`to_uncompiled` changes it back. Raises ValueError for anything else.
    """
    module = _wrapped(model)
    if module is None:
        raise ValueError(f"`model` is required to be a `OptimizedModule`. Found a `{type(model).__name__}` instead.")
    if not isinstance(module, Module):
        raise ValueError(
            f"`model` is expected to be a compiled LightningModule. Found a `{type(module).__name__}` instead"
        )
    if module._compiler_ctx is None:
        written = ("forward", "predict_step", *(name for name in _COMPILED if overridden(module, name, Module)))
        originals = {name: getattr(module, name) for name in written}
        module._compiler_ctx = {"compiler": "dynamo", "dynamo_ctx": model.dynamo_ctx} | {
            f"original_{name}": function for name, function in originals.items()
        }
        for name, function in originals.items():
            setattr(module, name, model.dynamo_ctx(function))
    return module


def to_uncompiled(model: Any) -> Module:
    """The Module as it was before it was compiled, from what ``torch.compile`` or :func:`from_compiled` returned.

    Raises ValueError for a module that is not compiled, and for anything else.
    """
    module = _wrapped(model)
    module = model if module is None else module
    if not isinstance(module, Module):
        if module is not model:
            raise TypeError(f"the compiled object holds a {type(module).__name__}, not a LightningModule")
        raise ValueError("`model` must either be an instance of OptimizedModule or LightningModule")
    if module._compiler_ctx is None:
        if module is model:
            raise ValueError(
                "`model` is required to be a compiled LightningModule. Found a non-compiled LightningModule instead."
            )
        return module
    for name in _COMPILED:
        original = module._compiler_ctx.get(f"original_{name}")
        if original is None:
            continue  # a step that the module does not have
        module.__dict__.pop(name, None)
        if getattr(module, name) != original:
            setattr(module, name, original)  # one that was set on the instance, before it was compiled
    module._compiler_ctx = None
    return module
