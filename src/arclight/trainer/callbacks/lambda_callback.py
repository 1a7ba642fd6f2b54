"""Make a callback from plain functions.

Users pass it as a callback; name and arguments are Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arclight.trainer.callback import Callback

HOOKS = frozenset(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class LambdaCallback(Callback):
    """``LambdaCallback(on_train_start=lambda trainer, module: print("go"))``: hooks by name.

    Raises TypeError for a name that is no hook, and for ``on_progress``.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"LambdaCallback: {name!r} is not a hook; hooks are {', '.join(sorted(HOOKS))}")
            if function is not None:
                setattr(self, name, function)
