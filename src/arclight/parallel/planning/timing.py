"""Estimate the time of a step: roofline for compute, rings for collectives, and overlap.

`estimates` asks it for each plan. Constants may be tuned to measurements.

Rules of overlap: exchanges of ``tp``, ``cp`` and ``ep`` are waited for where they are needed. Weights of the next link are
gathered, and gradients of the last one scattered, while a link computes; what takes longer counts, and the hidden part of an
exchange slows computing by :data:`OVERLAP_COST` of its own time, since both use the same memory and processors.
Activations between stages are waited for. The optimizer's step is bound by memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from arclight.parallel.hardware import STREAMED, Hardware
from arclight.parallel.op_recorder import Collective, Dimension, Message, summed
from arclight.parallel.pipeline.schedule.simulation import idle_seconds
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.plan import Plan
from arclight.parallel.planning.fsdp_shards import MASTER
from arclight.parallel.planning.memory import ChainLink, reduces_once, reshards
from arclight.parallel.planning.pp_layout import messages_per_micro_batch, stages_per_rank

OVERLAP_COST = 0.25
"""Seconds by which a second of hidden communication slows computing: assumed, between 0 and NCCL's share of the processors."""


def group(plan: Plan, dimension: Dimension) -> tuple[int, int]:
    """Return a group's number of processes, and the distance between neighbours.

    The mesh is pp, dp_replicate, dp_shard, cp, tp.
    """
    fsdp = plan.dp_shard * plan.cp
    return {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, plan.tp),
        "dp_shard": (fsdp, plan.tp),
        "dp_replicate": (plan.dp_replicate, plan.tp * fsdp),
        "pp": (plan.pp, plan.tp * fsdp * plan.dp_replicate),
    }[dimension]


def exchange_seconds(device: Hardware, size: int, stride: int, collective: Collective, nbytes: float) -> float:
    """Time of a collective over ``size`` processes that are ``stride`` apart.

    A ring moves (n - 1) / n of the bytes through every process (twice for an all-reduce: Patarasuk and Yuan 2009). Between
    nodes the members of one node divide the traffic among their adapters. An all-to-all sends to each member its part.
    """
    if size == 1 or not nbytes:
        return 0.0
    local = max(1, min(size, device.node // stride))
    nodes = -(-size // local)
    if collective == "send":
        near = 2 * stride <= device.node
        bandwidth, latency = (device.link, device.link_latency) if near else (device.network, device.network_latency)
        return nbytes / (bandwidth * 1e9) + latency * 1e-6
    if collective == "all_to_all":
        inside, across = nbytes * (local - 1) / size, nbytes * (size - local) / size
    else:
        inside, across = nbytes * (local - 1) / local, nbytes * (nodes - 1) / nodes / local
    latency = ((local - 1) * device.link_latency + (nodes - 1) * device.network_latency) * 1e-6
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (max(inside / (device.link * 1e9), across / (device.network * 1e9)) + latency)


def messages_seconds(device: Hardware, plan: Plan, messages: Iterable[Message]) -> float:
    """Time of messages that are waited for."""
    total = 0.0
    for message in messages:
        size, stride = group(plan, message.dimension)
        each = exchange_seconds(device, size, stride, message.collective, message.bytes / max(1.0, message.times))
        total += message.times * each
    return total


@dataclass(frozen=True)
class StageTime:
    """Seconds of one process per micro-batch, without waiting for others, and once per step."""

    forward: float
    backward: float
    computing: float
    """Seconds of computing in forward and backward."""
    exposed: float
    """Seconds of forward and backward that wait for messages of tp, cp and ep."""
    once: float
    """Gathering and scattering that nothing hides, once in a step."""

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def sharing(self) -> float:
        """Seconds that gathering weights and scattering gradients add to forward and backward."""
        return self.both - self.computing - self.exposed


def stage_time(links: Sequence[ChainLink], plan: Plan, device: Hardware) -> StageTime:
    """Time of a stage by the rules above."""
    kinds = {key: _LinkTime.of(link, plan, device) for key, link in {id(link): link for link in links}.items()}
    times = [kinds[id(link)] for link in links]
    computing, exposed = sum(t.computing for t in times), sum(t.forward + t.backward - t.computing for t in times)
    nothing = _LinkTime(0, 0, 0, 0, 0)
    rows = Counter(zip([nothing, *times[:-1]], times, [*times[1:], nothing], strict=True))
    forward = sum(n * _hidden(now.forward, after.gather) for (_, now, after), n in rows.items()) + times[0].gather
    if not reshards(plan) and reduces_once(plan):  # gathered and scattered once for the whole step
        once = forward - sum(t.forward for t in times) + sum(t.scatter for t in times)
        return StageTime(sum(t.forward for t in times), sum(t.backward for t in times), computing, exposed, once)
    # While a link goes backward, the weights of the one before come and the gradients of the one after go.
    again = reshards(plan)
    backward = sum(
        n * _hidden(now.backward, again * before.gather + after.scatter) for (before, now, after), n in rows.items()
    )
    return StageTime(forward, backward + again * times[-1].gather + times[0].scatter, computing, exposed, 0.0)


@dataclass(frozen=True)
class _LinkTime:
    computing: float
    forward: float
    backward: float
    gather: float
    scatter: float

    @classmethod
    def of(cls, link: ChainLink, plan: Plan, device: Hardware) -> _LinkTime:
        cost, share, _ = link
        size, stride = group(plan, "dp_shard")
        copies, stride_between = group(plan, "dp_replicate")
        gather = exchange_seconds(device, size, stride, "all_gather", share.exchanged * share.size)
        scatter = exchange_seconds(device, size, stride, "reduce_scatter", share.exchanged * MASTER)
        if not plan.independent_replicas:
            scatter += exchange_seconds(device, copies, stride_between, "all_reduce", share.shard_numel * MASTER)
        scatter += messages_seconds(device, plan, (Message("all_reduce", "tp", n * share.size) for n in share.summed))
        forward = cost.forward.seconds + messages_seconds(device, plan, cost.forward.messages)
        backward = cost.backward.seconds + messages_seconds(device, plan, cost.backward.messages)
        return cls(cost.forward.seconds + cost.backward.seconds, forward, backward, gather, scatter)


def _hidden(computing: float, sending: float) -> float:
    """Return the seconds of a link that computes while something is sent."""
    return max(computing + OVERLAP_COST * min(computing, sending), sending)


def idle_share(plan: Plan, micro_batches: int, backward_over_forward: float = 2.0) -> float:
    """Share of a step in which a stage of equal ones waits for others (the bubble).

    By the formula of the schedule (`schedule.table`), or from a simulation if it has none.
    """
    if plan.pp == 1:
        return 0.0
    kind = schedule_kind(plan.schedule)
    one = 1 + backward_over_forward
    if kind.idle_per_hop is not None:
        idle = (plan.pp - 1) * kind.idle_per_hop(backward_over_forward) / kind.stages_per_process
    else:
        number = micro_batches if kind.only is not None else min(micro_batches, 4 * plan.pp)
        idle = _simulated(plan.schedule, plan.pp, number, round(backward_over_forward / 2, 2))
    return idle / (micro_batches * one + idle)


@lru_cache(maxsize=1024)
def _simulated(schedule: str, processes: int, micro_batches: int, half: float) -> float:
    return idle_seconds(schedule, processes, micro_batches, 1.0, half, half)


def step_seconds(
    times: Sequence[StageTime], plan: Plan, device: Hardware, passes: int, boundary: int, elements: int, moments: int
) -> tuple[float, float, float]:  # fmt: skip
    """Return seconds of a step, idle share of stages, and seconds of the optimizer.

    boundary: bytes that a micro-batch carries from stage to stage. elements: parameters of a process.
    """
    # Weight, gradient and moments are read, weight and moments written; the norm reads the gradient once more.
    update = elements * MASTER * (4 + 2 * moments) / (device.bandwidth * STREAMED * 1e9)
    size, stride = group(plan, "pp")
    hops = 2 * stages_per_rank(plan) * exchange_seconds(device, size, stride, "send", boundary)
    slowest = max(times, key=lambda time: time.both)
    busy = passes * (slowest.both + hops)
    bubble = idle_share(plan, passes, slowest.backward / slowest.forward if slowest.forward else 2.0)
    return busy / (1 - bubble) + max(time.once for time in times) + update, bubble, update


def traffic(links: Sequence[ChainLink], plan: Plan, passes: int, stage: int, boundary: int) -> tuple[Message, ...]:
    """List what a process of ``stage`` sends in ``passes`` micro-batches.

    Bytes are those of whole tensors.
    boundary: bytes that a micro-batch carries from stage to stage.
    """
    return summed(message for message in _messages(links, plan, passes, stage, boundary) if message.bytes)


def _messages(links: Sequence[ChainLink], plan: Plan, passes: int, stage: int, boundary: int) -> Iterator[Message]:
    once = reduces_once(plan)
    reductions = 1 if once else passes
    for cost, share, last in links:
        for message in (*cost.forward.messages, *cost.backward.messages):
            yield message._replace(bytes=message.bytes * passes, times=message.times * passes)
        if share.exchanged:
            # The last part's weights stay from its forward to the end of backward.
            gathers = 1 if once and not reshards(plan) else 2 * passes if reshards(plan) and not last else passes
            yield Message("all_gather", "dp_shard", gathers * share.exchanged * share.size, gathers)
            yield Message("reduce_scatter", "dp_shard", reductions * share.exchanged * MASTER, reductions)
        if (
            plan.dp_replicate > 1 and not plan.independent_replicas
        ):  # those exchange once in many steps, which is left out
            yield Message("all_reduce", "dp_replicate", reductions * share.shard_numel * MASTER, reductions)
        for elements in share.summed:
            yield Message("all_reduce", "tp", reductions * elements * share.size, reductions)
    if plan.pp > 1:
        sent = passes * messages_per_micro_batch(plan, stage)
        yield Message("send", "pp", sent * boundary, sent)
