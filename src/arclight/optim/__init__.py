"""Build optimizers, parameter groups and learning-rate schedules from settings.

In: settings and named parameters; out: one :class:`MixedOptimizer` and a schedule. Open ``settings`` first: what a recipe may say, and
which rule updates which parameter. ``optimizer`` runs the rules (``elementwise_rules``, ``adopt``, ``muon``; ``stochastic_rounding`` for
weights and states in bfloat16). ``schedules`` has the curves of the learning rate and the scheduler that the fit loop steps,
``schedule_settings`` their settings; ``outer`` is the optimizer of federated rounds and DiLoCo. Optimizer states are in checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.optim.optimizer import MixedOptimizer as MixedOptimizer
    from arclight.optim.optimizer import restore_optimizer as restore_optimizer
    from arclight.optim.schedule_settings import WSD as WSD
    from arclight.optim.schedule_settings import Constant as Constant
    from arclight.optim.schedule_settings import Cosine as Cosine
    from arclight.optim.schedule_settings import InverseSqrt as InverseSqrt
    from arclight.optim.schedule_settings import Linear as Linear
    from arclight.optim.schedules import constant as constant
    from arclight.optim.schedules import cosine as cosine
    from arclight.optim.schedules import lambda_schedule as lambda_schedule
    from arclight.optim.schedules import wsd as wsd
    from arclight.optim.settings import ADOPT as ADOPT
    from arclight.optim.settings import QHADOPT as QHADOPT
    from arclight.optim.settings import SGD as SGD
    from arclight.optim.settings import AdamW as AdamW
    from arclight.optim.settings import Mixed as Mixed
    from arclight.optim.settings import Muon as Muon
    from arclight.optim.settings import NorMuon as NorMuon
    from arclight.optim.settings import decay_groups as decay_groups

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(("ADOPT", "QHADOPT", "SGD", "AdamW", "Mixed", "Muon", "NorMuon"), "arclight.optim.settings")
    | dict.fromkeys(("WSD", "Constant", "Cosine", "InverseSqrt", "Linear"), "arclight.optim.schedule_settings")
    | dict.fromkeys(("constant", "cosine", "wsd", "lambda_schedule"), "arclight.optim.schedules")
    | {
        "decay_groups": "arclight.optim.settings",
        "MixedOptimizer": "arclight.optim.optimizer",
        "restore_optimizer": "arclight.optim.optimizer",
    },
)
