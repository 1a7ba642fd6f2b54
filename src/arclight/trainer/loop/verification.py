"""Check that a module has the steps that an entry point needs; unwrap compiled modules.

``loop.session`` calls these when it sets fit, validate, test and predict up; ``compat`` offers the unwrapping. Messages hold Lightning's
words, which users' tests match. Hooks of Lightning 1.x that nothing calls are the tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.module import Module


def as_module(model: Any, entry_point: str) -> Module:
    """Return ``model`` if it is a Module, unwrapped if it was compiled.

    Raises TypeError for anything else.
    """
    if isinstance(model, Module):
        return model
    if isinstance(getattr(model, "_orig_mod", None), Module):
        return from_compiled(model)
    raise TypeError(
        f"`model` must be a `LightningModule` (an arclight.Module) or one that was given to torch.compile, got "
        f"`{type(model).__qualname__}`: Trainer.{entry_point} runs its steps, so subclass Module and give it a training_step"
    )


def require_model(model: Any, entry_point: str, known: Any) -> None:
    """Raise TypeError if neither ``model`` nor one ``known`` from an earlier run is there."""
    if model is None and known is None:
        raise TypeError(
            f"`Trainer.{entry_point}()` requires a `LightningModule` when it hasn't been passed in a previous run: pass a module"
        )


def check_module(module: Module, stage: str, clip_value: float | None, accumulate: int) -> None:
    """Raise MisconfigurationError if ``module`` lacks a method that ``stage`` needs."""
    if stage == "train":
        for name in ("training_step", "configure_optimizers"):
            if not overridden(module, name, Module):
                raise MisconfigurationError(
                    f"No `{name}()` method defined: fit needs at least `training_step()`, training data and "
                    f"`configure_optimizers()`; {type(module).__name__} lacks {name}"
                )
        _check_manual(module, clip_value, accumulate)
    elif stage == "predict":
        _check_predict(module)
    elif not overridden(module, name := {"validate": "validation_step"}.get(stage, "test_step"), Module):
        raise MisconfigurationError(f"No `{name}()` method defined to run `Trainer.{stage}`.")


_EPOCH_ENDS = {"training": "train", "validation": "validation", "test": "test", "predict": "predict"}

REMOVED_MODULE_HOOKS: Mapping[str, str] = {
    "configure_sharded_model": "`configure_model`, and make only layers that do not exist yet, since it is called before each run",
    **{
        f"{name}_epoch_end": f"`on_{stage}_epoch_end` and keep the outputs that it needs in attributes"
        for name, stage in _EPOCH_ENDS.items()
    },
}
"""Methods of modules that Lightning 1.x called, and what to use in their place."""

_REMOVED_CALLBACK_HOOKS: Mapping[str, str] = {
    "on_init_start": "the constructor of the callback, or `setup`",
    "on_init_end": "`setup`",
    "on_pretrain_routine_start": "`on_fit_start`",
    "on_pretrain_routine_end": "`on_fit_start`",
    "on_keyboard_interrupt": "`on_exception`",
    "on_configure_sharded_model": "`setup`",
    "on_before_accelerator_backend_setup": "`setup`",
    **{
        f"on_{kind}_{end}": f"`on_<stage>_{kind}_{end}` (`on_train_{kind}_{end}`, `on_validation_{kind}_{end}`, ...)"
        for kind in ("batch", "epoch")
        for end in ("start", "end")
    },
}
_REMOVED_STEP_ENDS: Mapping[str, str] = {
    f"{name}_step_end": f"`on_{stage}_batch_end`, or the end of `{name}_step`" for name, stage in _EPOCH_ENDS.items()
}
_STAGES_OF = {"training": ("train",), "validation": ("train", "validate"), "test": ("test",), "predict": ("predict",)}


def refuse_removed_hooks(module: Module, stage: str) -> None:
    """Raise NotImplementedError for a hook of Lightning 1.x that ``module`` has for ``stage``.

    It would not be called.
    """
    for name, replacement in REMOVED_MODULE_HOOKS.items():
        if stage in _STAGES_OF.get(name.partition("_")[0], (stage,)) and callable(getattr(module, name, None)):
            raise NotImplementedError(
                f"Support for `{name}` has been removed. `{type(module).__name__}` implements this method: use {replacement}"
            )


def warn_of_removed_hooks(module: Module, callbacks: Iterable[Callback], warn: Callable[[str], None]) -> None:
    """Warn of hooks of Lightning 1.x that a module or callback has, which nothing calls."""
    of_modules = {**REMOVED_MODULE_HOOKS, **_REMOVED_STEP_ENDS, **_REMOVED_CALLBACK_HOOKS}
    of_callbacks = {**_REMOVED_CALLBACK_HOOKS, **REMOVED_MODULE_HOOKS}
    for owner, removed in ((module, of_modules), *((callback, of_callbacks) for callback in callbacks)):
        for name, replacement in removed.items():
            if callable(getattr(type(owner), name, None)):
                warn(
                    f"`{type(owner).__name__}.{name}` is a hook of Lightning 1.x, which nothing calls: use {replacement}"
                )


def _check_predict(module: Module) -> None:
    if module.predict_step is None:
        raise MisconfigurationError("`predict_step` cannot be None to run `Trainer.predict`")
    forward = overridden(module, "forward", torch.nn.Module)
    if not forward and not overridden(module, "predict_step", Module):
        raise MisconfigurationError("`Trainer.predict` requires `forward` method to run.")


def _check_manual(module: Module, clip_value: float | None, accumulate: int) -> None:
    if module.automatic_optimization:
        return
    if clip_value:
        raise MisconfigurationError(
            "Automatic gradient clipping is not supported for manual optimization. Remove "
            f"`Trainer(gradient_clip_val={clip_value})` and call self.clip_gradients(optimizer, ...) in training_step"
        )
    if accumulate > 1:
        raise MisconfigurationError(
            "Automatic gradient accumulation is not supported for manual optimization. Remove "
            f"`Trainer(accumulate_grad_batches={accumulate})` and step and clear the optimizer only in every "
            "n-th batch"
        )


def check_validation(module: Module, has_data: bool, warn: Callable[[str], None]) -> None:
    """Warn if a fit has validation data and no step for it, or a step and no data."""
    has_step = overridden(module, "validation_step", Module)
    if has_data and not has_step:
        warn("You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop.")
    if has_step and not has_data:
        warn("You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.")


COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""Methods that are compiled with a module."""


def wrapped_module(model: object) -> nn.Module | None:
    """Return the module that ``torch.compile`` was given, if it made ``model``."""
    # Asked by name: the class lives in torch._dynamo, which takes seconds to import.
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else None  # type: ignore[attr-defined]


def from_compiled(model: Any) -> Module:
    """Return the Module inside a compiled one, with its forward and steps compiled.

    They are compiled as ``torch.compile`` was told to.

    The module itself is changed. Raises ValueError for anything else.
    """
    module = wrapped_module(model)
    if module is None:
        raise ValueError(f"`model` is required to be a `OptimizedModule`. Found a `{type(model).__name__}` instead.")
    if not isinstance(module, Module):
        raise ValueError(
            f"`model` is expected to be a compiled LightningModule. Found a `{type(module).__name__}` instead"
        )
    if module._compiler_ctx is None:
        written = ("forward", "predict_step", *(name for name in COMPILED if overridden(module, name, Module)))
        originals = {name: getattr(module, name) for name in written}
        module._compiler_ctx = {"compiler": "dynamo", "dynamo_ctx": model.dynamo_ctx} | {
            f"original_{name}": function for name, function in originals.items()
        }
        for name, function in originals.items():
            setattr(module, name, model.dynamo_ctx(function))
    return module
