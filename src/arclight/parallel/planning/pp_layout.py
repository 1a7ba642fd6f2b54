"""Lay out a chain of layers over pipeline ranks: links, in-flight activations, messages.

The planner's `estimates`, `memory` and `timing` call this; counts must agree with what the runtime's schedules do, which tests compare
with `arclight.parallel.pipeline.schedule.orders`. A plan without a pipeline (pp = 1) has one rank with all links.
"""

from __future__ import annotations

from dataclasses import replace

from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.table import ScheduleKind, check_pipeline, schedule_kind
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers
from arclight.parallel.plan import Plan
from arclight.parallel.planning.chain import Chain

LinkKinds = tuple[str | int, ...]
"""Kinds of the links of one rank: "first" (embedding), the kinds of its layers, "last" (head)."""


def stages_per_rank(plan: Plan) -> int:
    """Return how many stages each process of the pipeline has (virtual stages)."""
    return schedule_kind(plan.schedule).stages_per_process if plan.pp > 1 else 1


def stages(plan: Plan, process: int) -> list[int]:
    """Return the numbers of the stages of a process of the pipeline."""
    return stages_of(process, plan.pp, plan.pp * stages_per_rank(plan), _kind(plan).v_shaped)


def links_of_ranks(chain: Chain, plan: Plan, micro_batches: int) -> tuple[LinkKinds, ...]:
    """Return the kinds of the links of each process of the pipeline, in the order of the model.

    Raises PlanError, as a run would, for a model with too few layers, and for a number of micro-batches that the schedule cannot take.
    """
    if plan.pp == 1:
        return (("first", *chain.kinds, "last"),)
    check_pipeline(replace(plan, micro_batches=micro_batches))
    key = ("stages", plan.pp, stages_per_rank(plan), _kind(plan).v_shaped)
    found: tuple[LinkKinds, ...] = chain.once(key, lambda: _links_of_ranks(chain, plan))
    return found


def _links_of_ranks(chain: Chain, plan: Plan) -> tuple[LinkKinds, ...]:
    number = plan.pp * stages_per_rank(plan)
    parts = assign_layers(chain.model, number)
    kinds: dict[str, str | int] = dict(zip(chain.names, chain.kinds, strict=True))

    def links(stage: int) -> LinkKinds:
        own = tuple(kinds[name] for name in parts[stage].layers)
        return (*(("first",) if stage == 0 else ()), *own, *(("last",) if stage == number - 1 else ()))

    return tuple(tuple(kind for stage in stages(plan, process) for kind in links(stage)) for process in range(plan.pp))


def max_in_flight(plan: Plan, process: int, micro_batches: int) -> int:
    """Return the most passes (micro-batch, stage) whose activations a process holds at once.

    See `ScheduleKind.max_in_flight`; 1 without a pipeline.
    """
    return schedule_kind(plan.schedule).max_in_flight(plan.pp, process, micro_batches) if plan.pp > 1 else 1


def _kind(plan: Plan) -> ScheduleKind:
    return schedule_kind(plan.schedule)


def messages_per_micro_batch(plan: Plan, process: int) -> int:
    """Count a process's messages (activations, gradients) to other processes per micro-batch."""
    own, last = stages(plan, process), plan.pp * stages_per_rank(plan) - 1
    return sum((stage < last and stage + 1 not in own) + (stage > 0 and stage - 1 not in own) for stage in own)


def stages_with_input(plan: Plan, process: int) -> int:
    """Count the stages of a process that hold an input from another stage: all but stage 0.

    It is held as long as the stage's activations.
    """
    return sum(stage > 0 for stage in stages(plan, process)) if plan.pp > 1 else 0
