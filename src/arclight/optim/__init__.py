"""Optimizers, learning-rate schedules and parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.optim.groups import decay_groups
    from arclight.optim.schedules import constant, cosine, lambda_schedule, wsd
    from arclight.optim.settings import SGD, WSD, AdamW, Constant, Cosine

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {name: "arclight.optim.settings" for name in ("SGD", "WSD", "AdamW", "Constant", "Cosine")}
    | {name: "arclight.optim.schedules" for name in ("constant", "cosine", "wsd", "lambda_schedule")}
    | {"decay_groups": "arclight.optim.groups"},
)
