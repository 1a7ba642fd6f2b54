"""Lay a chain of layers out over pipeline ranks: the links, activations in flight and messages of each rank.

The planner's `estimates`, `memory` and `timing` call this; counts must agree with what the runtime's schedules do, which tests compare
with `arclight.parallel.pipeline.schedule.orders`. A plan without a pipeline (pp = 1) has one rank with all links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from arclight.parallel.pipeline.schedule.orders import held_at_most, stages_of
from arclight.parallel.pipeline.schedule.table import ScheduleKind, check_pipeline, is_file, order_of, schedule_kind
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

    Formulas for v stages on each of p processes and r micro-batches in a round; schedules without one are counted from their order. A
    schedule that splits the backward holds activations until the gradients of weights are computed.
    """
    p, v, m, s = plan.pp, stages_per_rank(plan), micro_batches, process
    if p == 1:
        return 1
    r = m // max(1, m // p)
    count: dict[str, Callable[[], int]] = {
        "GPipe": lambda: m,
        "1F1B": lambda: p - s,
        "LoopedBFS": lambda: v * m,
        "Interleaved1F1B": lambda: (v - 1) * r + 2 * (p - 1 - s) + 1,
        "InterleavedZeroBubble": lambda: (v - 1) * r + p,
        "ZBVZeroBubble": lambda: min(2 * p, m + 1 + s),
        "DualPipeV": lambda: 2 * p + 1,
        "ZB-H1": lambda: p,
        "ZB-H2": lambda: 2 * p - 1,
        "V-ZB": lambda: min(2 * p, m + 1 + s),
    }
    name = schedule_name(plan)
    if name not in count:
        return _counted(_kind(plan).name, p, m if is_file(name) else min(m, 4 * p))[s]
    return min(v * m, count[name]())


@lru_cache(maxsize=256)
def _counted(name: str, processes: int, micro_batches: int) -> list[int]:
    return held_at_most(order_of(name, processes, micro_batches))


def schedule_name(plan: Plan) -> str:
    """Return the schedule's name without a suffix such as ``:4``, the number of stages of each process."""
    return _kind(plan).name.partition(":")[0]


def _kind(plan: Plan) -> ScheduleKind:
    return schedule_kind(plan.schedule)


def messages_per_micro_batch(plan: Plan, process: int) -> int:
    """Count the activations and gradients that a process sends to other processes for each micro-batch."""
    own, last = stages(plan, process), plan.pp * stages_per_rank(plan) - 1
    return sum((stage < last and stage + 1 not in own) + (stage > 0 and stage - 1 not in own) for stage in own)


def stages_with_input(plan: Plan, process: int) -> int:
    """Count the stages of a process that hold an input from another stage as long as their activations: all but stage 0."""
    return sum(stage > 0 for stage in stages(plan, process)) if plan.pp > 1 else 0
