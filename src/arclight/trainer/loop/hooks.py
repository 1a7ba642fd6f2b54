"""Find the hooks that module and callbacks override, and resolve them for the loops.

`fit`, `step` and `evaluation` resolve hooks of a batch before the first one, so an empty hook costs nothing; `Trainer.call` resolves
those of epochs and runs when it calls them. ``trainer.data`` and ``checkpoint.state`` ask `overridden` too. Which attribute counts as
overridden, and the order of callbacks (`checkpoints_last`), must stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback, Checkpoint
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_callback, profile_module_hook

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


Hook = Callable[..., Any]

_WITHIN_A_STEP = frozenset(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
)


def overridden(owner: object, name: str, base: type) -> bool:
    """Return True if ``owner`` overrides ``name``, in its class or on the instance.

    An attribute None counts as not overridden.

    What only behaves like a ``base`` (a mock with its specification, say) has all that it answers to.
    """
    if name in vars(owner):
        return vars(owner)[name] is not None
    if base not in type(owner).__mro__:
        return callable(getattr(owner, name, None))
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)


def logging_as(module: Module, name: str, hook: Hook) -> Hook:
    """Wrap ``hook`` so that the values that it logs are attributed to it.

    For hooks that are called inside a step or another hook; elsewhere `Trainer.enter` sets the current hook.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        trainer = module.trainer
        values = trainer.logged
        before, entries = values.hook, module.__dict__["_entries"]
        trainer.enter(name)
        try:
            return hook(*arguments, **options)
        finally:
            values.hook, module.__dict__["_entries"] = before, entries

    return run


def attach_log(callbacks: Iterable[Callback], module: nn.Module) -> None:
    """Make ``self.log`` and ``self.log_dict`` of each callback the module's, during a run."""
    for callback in callbacks:
        for name in ("log", "log_dict"):
            if not hasattr(callback, name):
                setattr(callback, name, getattr(module, name))


def detach_log(callbacks: Iterable[Callback]) -> None:
    """Remove what :func:`attach_log` attached."""
    for callback in callbacks:
        for name in ("log", "log_dict"):
            if isinstance(getattr(vars(callback).get(name), "__self__", None), nn.Module):
                delattr(callback, name)


def unused_hooks(callback: Callback) -> frozenset[str]:
    found = callback.unused_hooks
    return found if isinstance(found, frozenset) else frozenset()


def callback_hooks(trainer: Trainer, module: Module, callbacks: Sequence[Callback], name: str) -> tuple[Hook, ...]:
    """Return the callbacks' own versions of hook ``name``, with trainer and module bound."""
    return tuple(
        profile_callback(trainer.profiler, callback, name, partial(getattr(callback, name), trainer, module))
        for callback in callbacks
        if overridden(callback, name, Callback) and name not in unused_hooks(callback)
    )


def module_hooks(module: Module, name: str) -> tuple[Hook, ...]:
    """Return the module's own version of hook ``name``, if it has one."""
    if not overridden(module, name, Module):
        return ()
    profiler = None if module._trainer is None else module._trainer.profiler
    return (profile_module_hook(profiler, module, name, getattr(module, name)),)


def within_a_step(module: Module, name: str, hooks: tuple[Hook, ...]) -> tuple[Hook, ...]:
    """Attribute what ``hooks`` log to hook ``name``, if it is one that runs inside a step."""
    return tuple(logging_as(module, name, hook) for hook in hooks) if name in _WITHIN_A_STEP else hooks


def check_state_keys(callbacks: Iterable[Callback]) -> None:
    """Raise RuntimeError if two callbacks would save their state under one name."""
    keys: set[str] = set()
    for callback in callbacks:
        if not overridden(callback, "state_dict", Callback):
            continue
        if callback.state_key in keys:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with the state_key "
                f"{callback.state_key!r}: only one of them could be resumed. Leave one out, or make their `state_key` differ"
            )
        keys.add(callback.state_key)


def checkpoints_last(callbacks: Iterable[Callback]) -> list[Callback]:
    """Order callbacks as given, then those that save, then those that may end the run."""
    return sorted(callbacks, key=lambda c: (c.runs_after_checkpoints is True, isinstance(c, Checkpoint)))


ITERATOR = "dataloader_iter"


def takes(function: Callable[..., Any], name: str, least: int | None = None) -> bool:
    """Return True if `function` takes a parameter `name`, ``*args``, or `least` positional ones."""
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    collects = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return name in parameters or collects or (least is not None and len(positional) >= least)


def takes_iterator(step: Callable[..., Any]) -> bool:
    """Return True for a step that takes an iterator over batches in place of a batch.

    Its parameter is ``dataloader_iter``.
    """
    return ITERATOR in inspect.signature(step).parameters


def note_iterator(name: str) -> None:
    """Warn that steps that take the iterator are experimental."""
    rank_zero_warn(
        f"Found `{ITERATOR}` argument in the `{name}`. Note that the support for this signature is experimental: batches are not "
        "moved to the device, and a step may take several of them"
    )


def check_loader_index(owner: object, name: str, least: int, several: bool, prefix: str) -> None:
    """Check that a hook takes ``dataloader_idx`` with several loaders, and only then.

    With one loader it may take it with a default. Raises RuntimeError.
    """
    function = getattr(owner, name)
    where = f"`{type(owner).__name__}.{name}()`"
    if several and not takes(function, "dataloader_idx", least):
        raise RuntimeError(
            f"You provided multiple `{prefix}_dataloader`, but no `dataloader_idx` argument in {where}. Try adding "
            "`dataloader_idx=0` to its signature."
        )
    parameter = inspect.signature(function).parameters.get("dataloader_idx")
    if not several and parameter is not None and parameter.default is inspect.Parameter.empty:
        raise RuntimeError(
            f"You provided only a single `{prefix}_dataloader`, but have included `dataloader_idx` in {where}. Either remove "
            "the argument or give it a default value i.e. `dataloader_idx=0`."
        )
