"""Which functions run at which moment: resolved once, so that a moment nobody cares about is an empty tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.trainer.callback import Callback
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Hook = Callable[..., Any]


def overridden(owner: object, name: str, base: type) -> bool:
    """Whether ``owner`` has its own ``name``: defined by its class or set on the instance. None takes one away."""
    if name in vars(owner):
        return vars(owner)[name] is not None
    own = getattr(type(owner), name, None)
    return own is not None and own is not getattr(base, name, None)


def callback_hooks(trainer: Trainer, module: Module, callbacks: Sequence[Callback], name: str) -> tuple[Hook, ...]:
    """The callbacks' own versions of hook ``name``, with trainer and module bound."""
    return tuple(
        partial(getattr(callback, name), trainer, module)
        for callback in callbacks
        if overridden(callback, name, Callback) and name not in callback.unused_hooks
    )


def module_hooks(module: Module, name: str) -> tuple[Hook, ...]:
    """The module's own version of hook ``name``, if it has one."""
    return (getattr(module, name),) if overridden(module, name, Module) else ()


def resolve(trainer: Trainer, module: Module, name: str) -> tuple[Hook, ...]:
    """Everything that runs at hook ``name``: callbacks in order, then the module."""
    return callback_hooks(trainer, module, trainer.callbacks, name) + module_hooks(module, name)
