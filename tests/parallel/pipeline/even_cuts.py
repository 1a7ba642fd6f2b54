"""A policy of `split` for tests that are not about where models are cut: to predict what calls cost takes longer than to run them."""

from __future__ import annotations

from arclight.parallel.pipeline.call_graph import CallGraph
from arclight.parallel.pipeline.cost.measure import closed_places
from arclight.parallel.pipeline.pipe import default_cuts, narrow
from arclight.parallel.pipeline.unit_costs import ModelCosts, UnitCost


def even_cuts(graph: CallGraph, stages: int) -> tuple[int, ...]:
    """Return the first calls of stages that have as many calls each."""
    costs = ModelCosts((UnitCost(1.0, 1.0, 1.0),) * len(graph.calls), closed=closed_places(graph))
    return default_cuts(costs, stages, begins=narrow(graph))
