"""One model over many devices: the plan of a mesh, and how it is applied from outside to a model that knows nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.apply import parallelize as parallelize
    from arclight.parallel.initial import Constant as Constant
    from arclight.parallel.initial import Normal as Normal
    from arclight.parallel.initial import draw as draw
    from arclight.parallel.initial import initialize as initialize
    from arclight.parallel.mesh import Mesh as Mesh
    from arclight.parallel.pipeline.training.strategy import Pipeline as Pipeline
    from arclight.parallel.plan import Plan as Plan
    from arclight.parallel.plan import PlanError as PlanError
    from arclight.parallel.strategy import PlanStrategy as PlanStrategy

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
