"""Estimate a plan: memory of every stage, exchanges, time of a step; nothing is run.

`mesh_search` calls `estimate` for each candidate; ``arclight plan`` calls `refined` and `simulated` for the best and prints them. In: a
`Chain`, with the device in its workload, a `Plan` and the samples of a micro-batch; out: bytes and seconds. Tests and ``arclight plan
--verify`` compare it with real runs. A field of `Plan` whose effect is not predicted belongs into ``_NOT_PREDICTED``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from arclight.parallel.op_recorder import Message
from arclight.parallel.pipeline.schedule.simulation import Prediction, simulate
from arclight.parallel.pipeline.schedule.step_trace import bubble
from arclight.parallel.pipeline.unit_costs import Link, UnitCost
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.planning.chain import Chain, Recompute
from arclight.parallel.planning.fsdp_shards import fsdp_shards_of
from arclight.parallel.planning.memory import ChainLink, MemoryEstimate, memory
from arclight.parallel.planning.pp_layout import (
    links_of_ranks,
    max_in_flight,
    stages,
    stages_per_rank,
    stages_with_input,
)
from arclight.parallel.planning.sharded_shapes import LayerSharding
from arclight.parallel.planning.timing import StageTime, exchange_seconds, group, stage_time, step_seconds, traffic

if TYPE_CHECKING:
    from arclight.parallel.hardware import Hardware


@dataclass(frozen=True)
class Estimate:
    """Plan with its predictions, of one step and one process; tuples by process of the pipeline."""

    plan: Plan
    samples: int
    """Samples of a micro-batch on one process."""
    passes: int
    """Micro-batches that follow one another in a step."""
    layers: tuple[int, ...]
    """Blocks of each process of the pipeline."""
    memory: tuple[MemoryEstimate, ...]
    """Peak memory of each process of the pipeline."""
    links: tuple[tuple[ChainLink, ...], ...]
    """Links of each process of the pipeline."""
    boundary: int
    """Bytes that a micro-batch carries from stage to stage."""
    times: tuple[StageTime, ...]
    """Times of each process of the pipeline."""
    step_seconds: float
    idle: float
    """Share of a step in which a process waits for other stages."""
    optimizer_seconds: float
    tokens: int
    """Tokens of all processes in a step."""
    model_flops: float
    """Floating-point operations of the model in a step, by the rules that MFU is published by."""
    nominal: float
    """FLOP/s of all processes together, by the data sheet."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.plan.world_size

    @property
    def mfu(self) -> float:
        """Share of the nominal FLOP/s that the model's own operations make up."""
        return self.model_flops / self.step_seconds / self.nominal

    @cached_property
    def worst(self) -> MemoryEstimate:
        """Memory of the stage that needs most."""
        return max(self.memory, key=lambda one: one.total)

    @cached_property
    def traffic(self) -> tuple[tuple[Message, ...], ...]:
        """Exchanges of a process of each stage."""
        return tuple(traffic(ls, self.plan, self.passes, s, self.boundary) for s, ls in enumerate(self.links))

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by cause, of the busiest stage.

        Their sum is the step: what nothing else explains is waiting.
        """
        busiest = max(self.times, key=lambda time: time.both)
        own = {
            "computing": self.passes * busiest.computing,
            "waiting for tensor, context and expert parallelism": self.passes * busiest.exposed,
            "gathering weights and scattering gradients": self.passes * busiest.sharing + busiest.once,
            "the optimizer": self.optimizer_seconds,
        }
        return own | {"waiting for other stages": max(0.0, self.step_seconds - sum(own.values()))}


def estimate(chain: Chain, plan: Plan, samples: int = 1) -> Estimate:
    """Predict ``plan`` with micro-batches of ``samples``.

    Raises PlanError for what cannot be run.
    """
    workload = chain.workload
    passes = _passes(chain, plan, samples)
    costs, owned = chain.costs(LayerSharding.of(plan), samples, _recompute(plan)), fsdp_shards_of(chain, plan)
    made: dict[str | int, ChainLink] = {kind: (costs[kind], owned[kind], kind == "last") for kind in costs}
    cuts = links_of_ranks(chain, plan, passes)
    counts = tuple(sum(isinstance(kind, int) for kind in kinds) for kinds in cuts)
    links = [tuple(made[kind] for kind in kinds) for kinds in cuts]
    boundary = costs["first"].output
    # Of processes that have alike links the one that holds most stands for all.
    alike = {tuple(map(id, links[s])): s for s in sorted(range(plan.pp), key=lambda s: max_in_flight(plan, s, passes))}
    leaders = [alike[tuple(map(id, own))] for own in links]
    memories = {s: memory(links[s], plan, workload, s, passes, boundary) for s in set(leaders)}
    times = {s: stage_time(links[s], plan, workload.device) for s in set(leaders)}
    per_stage = tuple(times[leader] for leader in leaders)
    elements = max(sum(share.shard_numel for _, share, _ in stage) for stage in links)
    seconds, idle, update = step_seconds(per_stage, plan, workload.device, passes, boundary, elements, workload.moments)
    rate = workload.device.bf16 if workload.compute.itemsize == 2 else workload.device.fp32
    return Estimate(
        plan, samples, passes, counts, tuple(memories[leader] for leader in leaders), tuple(links), boundary, per_stage,
        seconds, idle, update, workload.samples * workload.sequence, chain.flops_per_sample * workload.samples,
        rate * 1e12 * plan.world_size,
    )  # fmt: skip


def _passes(chain: Chain, plan: Plan, samples: int) -> int:
    workload = chain.workload
    passes, rest = divmod(workload.samples, plan.data_parallel * samples)
    if rest or not passes:
        unit = plan.data_parallel * samples
        raise PlanError(
            f"{workload.samples} samples cannot be divided among dp_replicate * dp_shard = {plan.data_parallel} processes in "
            f"micro-batches of {samples}: use a multiple of {unit}, such as {-(-workload.samples // unit) * unit}"
        )
    plan.check(sequence_length=workload.sequence, layers=len(chain.kinds) or None)
    if plan.pp > passes:
        raise PlanError(
            f"{passes} micro-batches leave some of pp = {plan.pp} stages idle for good: use smaller micro-batches or pp = {passes}"
        )
    return passes


_NOT_PREDICTED = (
    ("float8", "none"),
    ("cpu_offload", False),
    ("async_tp", False),
    ("expert_capacity", 0),
)
"""Fields of a plan, and the only values for which anything is predicted."""


def _recompute(plan: Plan) -> Recompute:
    """Return what blocks recompute.

    Raises PlanError for choices whose effect is not predicted, so that none is left out silently.
    """
    for name, plain in _NOT_PREDICTED:
        if getattr(plan, name) != plain:
            raise PlanError(
                f"what {name} = {getattr(plan, name)} saves or costs is not predicted: plan without it, and set it then"
            )
    how = plan.activation_checkpointing
    if how == "none" or how == "selective" or how == "full":  # noqa: PLR1714  (so that the type is known)
        return how
    raise PlanError(
        f"what a compiler keeps under a budget of {how} cannot be predicted: choose activation_checkpointing none, selective or full"
    )


def refined(estimate: Estimate, device: Hardware) -> Estimate:
    """Refine the time of a plan with a pipeline by simulating its schedule.

    A search compares thousands of plans by formulas, which take every stage for the slowest one.
    """
    if estimate.plan.pp == 1:
        return estimate
    step = simulated(estimate, device)
    return replace(estimate, step_seconds=step.step_seconds, idle=bubble(step))


def simulated(estimate: Estimate, device: Hardware) -> Prediction:
    """Return a step of one of the plan's pipelines, each action at its time.

    If a process has several stages, they share its time and its activations alike; half of a backward is that of the weights.
    Raises PlanError for a plan without a pipeline.
    """
    plan = estimate.plan
    if plan.pp == 1:
        raise PlanError("a plan with pp = 1 has no pipeline to simulate: decide pp = 2 or more")
    size, stride = group(plan, "pp")
    hop = exchange_seconds(device, size, stride, "send", estimate.boundary)
    costs = [UnitCost(0, 0, 0)] * plan.pp * stages_per_rank(plan)
    for process, time in enumerate(estimate.times):
        own = stages(plan, process)
        held = (
            sum(cost.saved_activation_bytes for cost, _, _ in estimate.links[process])
            + stages_with_input(plan, process) * estimate.boundary
        )
        half = time.backward / 2 / len(own)
        for stage in own:
            costs[stage] = UnitCost(
                time.forward / len(own), half, half, saved_activation_bytes=held // len(own), output=estimate.boundary
            )
    end = max(time.once for time in estimate.times) + estimate.optimizer_seconds
    return simulate(plan.schedule, costs, plan.pp, estimate.passes, link=Link(latency=hop), optimizer=end)
