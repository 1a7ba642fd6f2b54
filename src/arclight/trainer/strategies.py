"""The choice of a strategy, which also knows those of rooms above fabric by name; they are imported when they are asked for."""

from __future__ import annotations

from typing import Any

from arclight.fabric.selection import select
from arclight.fabric.strategies import STRATEGY_REGISTRY

__all__ = ["select"]


def _pipeline(**options: Any) -> Any:
    from arclight.parallel.pipeline import Pipeline

    return Pipeline(**options)


STRATEGY_REGISTRY.register(
    "pipeline", _pipeline, "stages of a model on several processes, micro-batches running through them"
)
