"""Which functions run at which moment: resolved once, so that a moment nobody cares about is an empty tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.trainer.callback import Callback
from arclight.trainer.module import Module
from arclight.trainer.profilers.watching import watch_callback, watch_module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Hook = Callable[..., Any]

_WITHIN_A_STEP = frozenset(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
)


def overridden(owner: object, name: str, base: type) -> bool:
    """Whether ``owner`` has its own ``name``: defined by its class or set on the instance. None takes one away.

    What only behaves like a ``base`` (a mock with its specification, say) has all that it answers to.
    """
    if name in vars(owner):
        return vars(owner)[name] is not None
    if base not in type(owner).__mro__:
        return callable(getattr(owner, name, None))
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)


def logging_as(module: Module, name: str, hook: Hook) -> Hook:
    """``hook`` with what it logs belonging to it, and what comes afterwards to whoever called it.

    For hooks that run inside a step: loops say by themselves in which of theirs they are.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        trainer = module.trainer
        values, before, entries = trainer.logged, trainer.logged.hook, module.__dict__["_entries"]
        trainer.enter(name)
        try:
            return hook(*arguments, **options)
        finally:
            values.hook, module.__dict__["_entries"] = before, entries

    return run


def unused_hooks(callback: Callback) -> frozenset[str]:
    found = callback.unused_hooks
    return found if isinstance(found, frozenset) else frozenset()


def callback_hooks(trainer: Trainer, module: Module, callbacks: Sequence[Callback], name: str) -> tuple[Hook, ...]:
    """The callbacks' own versions of hook ``name``, with trainer and module bound."""
    return tuple(
        watch_callback(trainer, callback, name, partial(getattr(callback, name), trainer, module))
        for callback in callbacks
        if overridden(callback, name, Callback) and name not in unused_hooks(callback)
    )


def module_hooks(module: Module, name: str) -> tuple[Hook, ...]:
    """The module's own version of hook ``name``, if it has one."""
    if not overridden(module, name, Module):
        return ()
    return (watch_module(module._trainer, module, name, getattr(module, name)),)


def resolve(trainer: Trainer, module: Module, name: str) -> tuple[Hook, ...]:
    """Everything that runs at hook ``name``: callbacks in order, then the module."""
    hooks = callback_hooks(trainer, module, trainer.callbacks, name) + module_hooks(module, name)
    return tuple(logging_as(module, name, hook) for hook in hooks) if name in _WITHIN_A_STEP else hooks
