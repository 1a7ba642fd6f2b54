"""One model over many devices: the plan of a mesh, and how it is applied from outside to a model that knows nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.apply import parallelize
    from arclight.parallel.initial import Constant, Normal, draw, initialize
    from arclight.parallel.mesh import Mesh
    from arclight.parallel.pipeline.training.strategy import Pipeline
    from arclight.parallel.plan import Plan, PlanError
    from arclight.parallel.strategy import PlanStrategy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Constant": "arclight.parallel.initial",
        "Mesh": "arclight.parallel.mesh",
        "Normal": "arclight.parallel.initial",
        "Pipeline": "arclight.parallel.pipeline.training.strategy",
        "Plan": "arclight.parallel.plan",
        "PlanError": "arclight.parallel.plan",
        "PlanStrategy": "arclight.parallel.strategy",
        "draw": "arclight.parallel.initial",
        "initialize": "arclight.parallel.initial",
        "parallelize": "arclight.parallel.apply",
    },
)
