"""Search the meshes of all ranks for the fastest plan, by formulas.

``arclight plan`` calls `search` for models that declare their shards. A `Chain` and `Limits` come in; the best plans and the rejected ones go
out. Thousands of plans are compared: dimensions of the mesh, schedule, recomputation, resharding. For a model that declares nothing, whose
mesh has pipelines and replicas only, `pipeline.cost.pipeline_search` decides where it is cut by simulating each candidate. Both read
`pipeline.schedule.table` (decision 17). A schedule, recomputation or micro-batch to try is an entry of the lists below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from arclight.parallel.pipeline.schedule.table import NOT_COMPILED, schedule_kind
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.planning.chain import Chain
from arclight.parallel.planning.estimates import Estimate, estimate
from arclight.parallel.planning.explain import RejectedPlan, describe, memory_name, neighbours
from arclight.parallel.planning.fsdp_shards import MASTER
from arclight.parallel.planning.sharded_shapes import LayerSharding

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZB-H1", "InterleavedZeroBubble", "ZBVZeroBubble", "V-Half", "V-Min")
"""Schedules that are tried; others are predicted if a plan fixes them. GPipe and LoopedBFS hold more activations than 1F1B and
Interleaved1F1B and idle as long; DualPipeV is for exchanges of experts that overlap, which is not predicted."""
_COMPILED = f"{NOT_COMPILED} (--eager leaves them uncompiled)"
RECOMPUTE = ("none", "selective", "full")
SAMPLES = (1, 2, 4, 8)
"""Sizes of micro-batches that are tried."""
TOKENS = 4096
"""Least tokens of a sequence on each rank of ``cp`` that is tried, unless ``cp`` is fixed."""


@dataclass(frozen=True)
class Limits:
    """Limits of a search."""

    gpus: int
    memory: float
    """Bytes that a process may hold."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of the plan that are decided, by name."""
    samples: int | None = None
    """Samples of a micro-batch; None to choose them."""


@dataclass(frozen=True)
class SearchResult:
    """The answer of :func:`search`."""

    best: list[Estimate]
    """Plans that fit, the fastest of each mesh, fastest first."""
    rejected: list[RejectedPlan]
    """Plans that differ from the first of them in one choice, and why they were not chosen."""
    considered: int
    """Plans that were predicted."""


def search(chain: Chain, limits: Limits, keep: int = 5) -> SearchResult:
    """Return the fastest plans for ``limits.gpus`` processes that fit.

    Raises PlanError if none does, naming what comes nearest.
    """
    fitting: list[Estimate] = []
    too_large: list[Estimate] = []
    refused: list[tuple[Plan, str]] = []
    for plan in meshes(chain, limits, refused):
        for candidate, samples in variants(chain, plan, limits, refused):
            try:
                made = estimate(chain, candidate, samples)
            except PlanError as error:
                refused.append((candidate, str(error)))
                continue
            (fitting if made.worst.total <= limits.memory else too_large).append(made)
    if not fitting:
        raise PlanError(_nothing_fits(chain, too_large, refused, limits))
    fitting.sort(key=lambda one: (one.step_seconds, one.worst.total))
    first_of_mesh: dict[tuple[int, ...], Estimate] = {}
    for one in fitting:
        first_of_mesh.setdefault(_mesh(one.plan), one)
    rejected = neighbours(fitting, too_large, refused, limits.memory)
    return SearchResult(list(first_of_mesh.values())[:keep], rejected, len(fitting) + len(too_large))


def _mesh(plan: Plan) -> tuple[int, ...]:
    return (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.ep)


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of ``number`` up to ``limit``, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def meshes(chain: Chain, limits: Limits, refused: list[tuple[Plan, str]]) -> Iterator[Plan]:
    """Yield plans of ``limits.gpus`` processes by mesh; refused ones go to ``refused``.

    Those are meshes that do not fit the model.
    """
    workload, gpus, fixed = chain.workload, limits.gpus, limits.fixed
    node = min(workload.device.node, gpus)
    tps = _choices(fixed, "tp", divisors(gpus, node))  # across nodes its exchanges would take most of the time
    cps = _choices(fixed, "cp", divisors(gpus, max(1, workload.sequence // TOKENS)))
    stages = 1 if fixed.get("replicas") == "independent" else max(1, len(chain.kinds))
    pps = _choices(fixed, "pp", divisors(gpus, stages))
    eps = _choices(fixed, "ep", divisors(chain.experts, gpus) if chain.experts else [1])
    for tp, cp in product(tps, cps):
        try:
            small = Plan(**{**_whole_choices(fixed), "tp": tp, "cp": cp})
            small.check(sequence_length=workload.sequence)
            parameters = chain.parameters(LayerSharding.of(small))
        except PlanError as error:
            refused.append((Plan(tp=tp, cp=cp), str(error)))
            continue
        links: list[str | int] = ["first", *chain.kinds, "last"]
        elements = sum(parameters[kind].elements for kind in links)
        state = elements * MASTER * (1 + workload.moments)
        for pp in pps:
            dp, rest = divmod(gpus, tp * cp * pp)
            if rest or workload.samples % dp:
                continue
            copied = fixed.get("dp_replicate")
            useful = _useful_shards(dp, tp * cp, node) if copied is None else [max(1, dp // copied)]
            shards = _choices(fixed, "dp_shard", useful)
            for dp_shard, ep in product(shards, eps):
                copies, rest = divmod(dp, dp_shard)
                if rest or (dp_shard * cp) % ep or fixed.get("dp_replicate", copies) != copies:
                    continue
                if state / (pp * dp_shard * cp) > 2 * limits.memory and dp_shard != shards[0]:
                    continue  # not even the weights, by far, and more could be sharded: not worth a word
                sizes = {"pp": pp, "dp_replicate": copies, "dp_shard": dp_shard, "cp": cp, "tp": tp, "ep": ep}
                yield Plan(**{**_whole_choices(fixed), **sizes})


def _choices(fixed: dict[str, Any], name: str, choices: list[int]) -> list[int]:
    return [fixed[name]] if name in fixed else choices


def _whole_choices(fixed: dict[str, Any]) -> dict[str, Any]:
    """Return those of the decided fields that fit any mesh."""
    sizes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "micro_batches")
    return {name: value for name, value in fixed.items() if name not in sizes}


def _useful_shards(dp: int, inner: int, node: int) -> list[int]:
    """Return sizes of sharding groups: all, fewer by steps of four, one node's, none.

    The largest comes first.
    """
    within = max(1, node // inner)
    sizes = {1, dp, *(within * 4**step for step in range(12))}
    return sorted((size for size in sizes if size <= dp and dp % size == 0), reverse=True)


def variants(
    chain: Chain, plan: Plan, limits: Limits, refused: list[tuple[Plan, str]]
) -> Iterator[tuple[Plan, int]]:  # fmt: skip
    """Yield variants of a mesh: plans with their samples per micro-batch.

    They vary micro-batches, schedules, recomputation and resharding. Schedules that compiled blocks cannot follow go to
    ``refused``.
    """
    fixed, local = limits.fixed, chain.workload.samples // plan.data_parallel
    sizes = SAMPLES if limits.samples is None else (limits.samples,)
    schedules: Sequence[str] = (plan.schedule,)
    if plan.pp > 1 and "schedule" not in fixed:
        schedules = SCHEDULES
        if plan.compile != "none":
            halves = [name for name in SCHEDULES if schedule_kind(name).splits_backward]
            schedules = [name for name in SCHEDULES if name not in halves]
            refused.append(
                (replace(plan, schedule=halves[0], compile="none"), f"as {', '.join(halves[1:])}: {_COMPILED}")
            )
    recompute = RECOMPUTE if "activation_checkpointing" not in fixed else (plan.activation_checkpointing,)
    reshard: Sequence[str] = (plan.reshard_after_forward,)
    if "reshard_after_forward" not in fixed and plan.dp_shard * plan.cp > 1 and plan.pp == 1:
        reshard = ("never", "always")
    for samples in sizes:
        passes, rest = divmod(local, samples)
        if rest or passes < plan.pp or fixed.get("micro_batches", 0) not in (0, passes):
            continue
        for schedule, how, when in product(schedules, recompute, reshard):
            kind = schedule_kind(schedule)
            stages = plan.pp * kind.stages_per_process
            if (
                plan.pp > 1
                and "schedule" not in fixed
                and (stages > len(chain.kinds) or not kind.fits(passes, plan.pp))
            ):
                continue
            choices = {"schedule": schedule, "activation_checkpointing": how, "reshard_after_forward": when}
            yield replace(plan, **choices, micro_batches=passes if plan.pp > 1 else 0), samples  # type: ignore[arg-type]


def _nothing_fits(chain: Chain, too_large: list[Estimate], refused: list[tuple[Plan, str]], limits: Limits) -> str:
    if too_large:
        least = min(too_large, key=lambda one: one.worst.total)
        worst, gib = least.worst, 2**30
        return (
            f"no plan for {limits.gpus} GPUs fits into {limits.memory / gib:.1f} GiB: the smallest ({describe(least.plan)}) needs "
            f"{worst.total / gib:.1f} GiB, {getattr(worst, worst.largest) / gib:.1f} of them {memory_name(worst.largest)}; take more GPUs, "
            "shorter sequences, or leave more of the plan open"
        )
    whole = [reason for plan, reason in refused if plan.world_size == limits.gpus]
    uncut = [reason for plan, reason in refused if {"tp", "cp"} & limits.fixed.keys() or plan.world_size == 1]
    if whole or uncut:
        return f"no plan for {limits.gpus} GPUs can be run: {[*whole, *uncut][0]}"
    return (
        f"no plan cuts {limits.gpus} GPUs so that each data-parallel process has as many of the {chain.workload.samples} samples of a step, "
        "and each pipeline stage a micro-batch: take more samples (a multiple of the number of GPUs always fits) or fewer GPUs"
    )
