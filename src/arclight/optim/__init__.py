"""Optimizers, learning-rate schedules and parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.optim.groups import decay_groups
    from arclight.optim.optimizer import MixedOptimizer
    from arclight.optim.restore import restore_optimizer
    from arclight.optim.schedule_settings import WSD, Constant, Cosine, InverseSqrt, Linear
    from arclight.optim.schedules import constant, cosine, lambda_schedule, wsd
    from arclight.optim.settings import SGD, AdamW, Mixed, Muon, NorMuon

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("SGD", "AdamW", "Mixed", "Muon", "NorMuon"), "arclight.optim.settings")
    | dict.fromkeys(("WSD", "Constant", "Cosine", "InverseSqrt", "Linear"), "arclight.optim.schedule_settings")
    | dict.fromkeys(("constant", "cosine", "wsd", "lambda_schedule"), "arclight.optim.schedules")
    | {
        "decay_groups": "arclight.optim.groups",
        "MixedOptimizer": "arclight.optim.optimizer",
        "restore_optimizer": "arclight.optim.restore",
    },
)
