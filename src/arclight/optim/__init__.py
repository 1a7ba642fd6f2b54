"""Optimizers, learning-rate schedules and parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.optim.groups import decay_groups
    from arclight.optim.restore import restore_optimizer
    from arclight.optim.schedules import constant, cosine, lambda_schedule, wsd
    from arclight.optim.settings import SGD, WSD, AdamW, Constant, Cosine

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("SGD", "WSD", "AdamW", "Constant", "Cosine"), "arclight.optim.settings")
    | dict.fromkeys(("constant", "cosine", "wsd", "lambda_schedule"), "arclight.optim.schedules")
    | {"decay_groups": "arclight.optim.groups", "restore_optimizer": "arclight.optim.restore"},
)
