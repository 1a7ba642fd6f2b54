"""Run one model over many devices, by a plan of a mesh applied to a plain model.

In come a `Plan` (``plan.py``: the degree of each parallel dimension) and a model; out comes the model, changed in place, or a strategy
that runs a Trainer or Fabric on the plan. Open ``plan.py`` first, then ``model/parallelize.py``. The names below are public and stay.

* ``plan``, ``mesh``, ``blocks``, ``deterministic_init``, ``step_protocol``: what all others share.
* ``layers``: tensor, context and expert parallelism, put into modules.
* ``model``: the order in which a plan is applied (float8, layers, activation checkpoints, compilation, FSDP).
* ``pipeline``: stages, schedules and what runs them.
* ``planning``: memory, traffic and time of plans, predicted on ``hardware`` from operations that ``op_recorder`` sees.
* ``strategy``, ``pipeline_strategy``: plans and pipelines for a Trainer or Fabric.
"""

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
