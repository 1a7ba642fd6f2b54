"""Select the strategy of a Trainer or Fabric; those of ``parallel`` are imported on demand.

`Trainer` and `Fabric` call `select`. ``fabric.selection`` does the rest; only what needs ``parallel``, which ``fabric`` must not import,
is here. Importing this registers the name ``pipeline``.
"""

from __future__ import annotations

from typing import Any

from arclight.fabric import selection
from arclight.fabric.strategies import STRATEGY_REGISTRY, Strategy
from arclight.parallel.plan import Plan

__all__ = ["select"]


def select(*, strategy: Any = "auto", **options: Any) -> Strategy:
    """Choose the strategy that a user asked for, which may be a `Plan`."""
    if isinstance(strategy, Plan):
        from arclight.parallel.strategy import PlanStrategy

        strategy = PlanStrategy(strategy)
    return selection.select(strategy=strategy, **options)


def _pipeline(**options: Any) -> Any:
    from arclight.parallel.pipeline import Pipeline

    return Pipeline(**options)


STRATEGY_REGISTRY.register(
    "pipeline", _pipeline, "stages of a model on several processes, micro-batches running through them"
)
