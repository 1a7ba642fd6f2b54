"""One model over many devices: the plan of a mesh, and how it is applied from outside to a model that knows nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.deterministic_init import Constant as Constant
    from arclight.parallel.deterministic_init import Normal as Normal
    from arclight.parallel.deterministic_init import draw as draw
    from arclight.parallel.deterministic_init import initialize as initialize
    from arclight.parallel.mesh import Mesh as Mesh
    from arclight.parallel.model.parallelize import parallelize as parallelize
    from arclight.parallel.pipeline_strategy import Pipeline as Pipeline
    from arclight.parallel.plan import Plan as Plan
    from arclight.parallel.plan import PlanError as PlanError
    from arclight.parallel.strategy import PlanStrategy as PlanStrategy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Constant": "arclight.parallel.deterministic_init",
        "Mesh": "arclight.parallel.mesh",
        "Normal": "arclight.parallel.deterministic_init",
        "Pipeline": "arclight.parallel.pipeline_strategy",
        "Plan": "arclight.parallel.plan",
        "PlanError": "arclight.parallel.plan",
        "PlanStrategy": "arclight.parallel.strategy",
        "draw": "arclight.parallel.deterministic_init",
        "initialize": "arclight.parallel.deterministic_init",
        "parallelize": "arclight.parallel.model.parallelize",
    },
)
