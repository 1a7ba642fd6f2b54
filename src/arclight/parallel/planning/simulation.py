"""The pipeline of a plan, step by step, as its estimate has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from arclight.parallel.pipeline.costs import Link, UnitCost
from arclight.parallel.pipeline.schedules.simulation import Prediction, simulate
from arclight.parallel.pipeline.views.bubbles import bubble
from arclight.parallel.plan import PlanError
from arclight.parallel.planning.stages import chunks, entrances, stages
from arclight.parallel.planning.timing import exchange_seconds, group

if TYPE_CHECKING:
    from arclight.parallel.planning.devices import Hardware
    from arclight.parallel.planning.estimates import Estimate


def refined(estimate: Estimate, device: Hardware) -> Estimate:
    """Take seconds and idle share of a plan with a pipeline from its simulation, which a timeline shows; else leave it.

    A search compares thousands of plans by formulas, which take every stage for the slowest one.
    """
    if estimate.plan.pp == 1:
        return estimate
    step = simulated(estimate, device)
    return replace(estimate, seconds=step.step_seconds, idle=bubble(step))


def simulated(estimate: Estimate, device: Hardware) -> Prediction:
    """A step of one of the plan's pipelines, each action at its time.

    Where a process has several stages, they share its time and its activations alike; half of a backward is that of the weights.
    Raises PlanError for a plan without a pipeline.
    """
    plan = estimate.plan
    if plan.pp == 1:
        raise PlanError("a plan with pp = 1 has no pipeline to simulate: decide pp = 2 or more")
    size, stride = group(plan, "pp")
    hop = exchange_seconds(device, size, stride, "send", estimate.boundary)
    costs = [UnitCost(0, 0, 0)] * plan.pp * chunks(plan)
    for process, time in enumerate(estimate.times):
        own = stages(plan, process)
        held = sum(cost.held for cost, _, _ in estimate.links[process]) + entrances(plan, process) * estimate.boundary
        half = time.backward / 2 / len(own)
        for stage in own:
            costs[stage] = UnitCost(
                time.forward / len(own), half, half, held=held // len(own), output=estimate.boundary
            )
    end = max(time.once for time in estimate.times) + estimate.update
    return simulate(plan.schedule, costs, plan.pp, estimate.passes, link=Link(latency=hop), optimizer=end)
