"""Lay a chain out over pipeline ranks: the links, activations and messages of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from arclight.parallel.pipeline.schedule.orders import held_at_most, stages_of
from arclight.parallel.pipeline.schedule.table import ScheduleKind, check_pipeline, is_file, order_of, schedule_kind
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers
from arclight.parallel.plan import Plan
from arclight.parallel.planning.chain import Chain

Kinds = tuple[str | int, ...]


def chunks(plan: Plan) -> int:
    """Stages that each process has."""
    return schedule_kind(plan.schedule).stages_per_process if plan.pp > 1 else 1


def stages(plan: Plan, process: int) -> list[int]:
    """Return the numbers of the stages that a process of the pipeline has."""
    return stages_of(process, plan.pp, plan.pp * chunks(plan), _kind(plan).v_shaped)


def cut(chain: Chain, plan: Plan, micro_batches: int) -> tuple[Kinds, ...]:
    """Kinds of the links of each process of the pipeline, in the order of the model.

    Raises PlanError, as a run would, for a model that cannot be cut so, and for micro-batches that the schedule cannot take.
    """
    if plan.pp == 1:
        return (("first", *chain.kinds, "last"),)
    check_pipeline(replace(plan, micro_batches=micro_batches))
    key = ("stages", plan.pp, chunks(plan), _kind(plan).v_shaped)
    found: tuple[Kinds, ...] = chain.once(key, lambda: _cut(chain, plan))
    return found


def _cut(chain: Chain, plan: Plan) -> tuple[Kinds, ...]:
    number = plan.pp * chunks(plan)
    parts = assign_layers(chain.model, number)
    kinds: dict[str, str | int] = dict(zip(chain.names, chain.kinds, strict=True))

    def links(stage: int) -> Kinds:
        own = tuple(kinds[name] for name in parts[stage].layers)
        return (*(("first",) if stage == 0 else ()), *own, *(("last",) if stage == number - 1 else ()))

    return tuple(tuple(kind for stage in stages(plan, process) for kind in links(stage)) for process in range(plan.pp))


def held(plan: Plan, process: int, micro_batches: int) -> int:
    """Count the passes through a stage whose activations a process holds at once, at most.

    Counts of the schedules' own instructions, with v stages on each of p processes and r micro-batches in a round; those
    without a formula are counted. Where gradients of weights are computed apart, activations are held until then.
    """
    p, v, m, s = plan.pp, chunks(plan), micro_batches, process
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
    name = schedule(plan)
    if name not in count:
        return _counted(_kind(plan).name, p, m if is_file(name) else min(m, 4 * p))[s]
    return min(v * m, count[name]())


@lru_cache(maxsize=256)
def _counted(name: str, processes: int, micro_batches: int) -> list[int]:
    return held_at_most(order_of(name, processes, micro_batches))


def schedule(plan: Plan) -> str:
    """Return the schedule's name, without the number of stages of each process."""
    return _kind(plan).name.partition(":")[0]


def _kind(plan: Plan) -> ScheduleKind:
    return schedule_kind(plan.schedule)


def crossings(plan: Plan, process: int) -> int:
    """Activations and gradients that a process sends to others for each micro-batch."""
    own, last = stages(plan, process), plan.pp * chunks(plan) - 1
    return sum((stage < last and stage + 1 not in own) + (stage > 0 and stage - 1 not in own) for stage in own)


def entrances(plan: Plan, process: int) -> int:
    """Stages of a process whose input comes from another part of the model, and is held as long as their activations."""
    return sum(stage > 0 for stage in stages(plan, process)) if plan.pp > 1 else 0
