"""Estimate the peak memory of a rank in a step, by kind, for each process of a pipeline.

`estimates` calls `memory` for each plan; `timing` shares its rules of resharding, and ``arclight plan`` prints a `MemoryEstimate`. Rules
follow what FSDP and the pipeline's runtime hold, and may be refined by measurements.

A step is followed through the links of a process, forward and back: what earlier links hold for backward, what the link at hand
needs for the moment, which weights are gathered, which gradients are there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from arclight.parallel.plan import Plan
from arclight.parallel.planning.chain import Cost, Workload
from arclight.parallel.planning.fsdp_shards import MASTER, FsdpShard
from arclight.parallel.planning.pp_layout import max_in_flight, stages_per_rank, stages_with_input


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the moment when a process holds most."""

    parameters: int = 0
    """This rank's shard of the weights, float32."""
    gradients: int = 0
    """This rank's shard of their gradients, float32."""
    optimizer: int = 0
    """The optimizer's moments of that shard; if replicas are independent, also the weights they agreed on and the outer velocity."""
    activations: int = 0
    """What one micro-batch leaves for backward, and what the link at hand needs for the moment."""
    in_flight: int = 0
    """Activations of the other micro-batches that the pipeline has begun."""
    logits: int = 0
    """What the last part and the loss need for the moment."""
    gathered: int = 0
    """Weights gathered from other processes, and gradients that are not scattered yet."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def largest(self) -> str:
        """The class that takes most."""
        return max(fields(self), key=lambda field: int(getattr(self, field.name))).name


ChainLink = tuple[Cost, FsdpShard, bool]
"""What a link costs, how its parameters are shared, whether it is the last of the model."""


def reshards(plan: Plan) -> bool:
    """Return True for plans that reshard weights between forward and backward."""
    return plan.reshard_after_forward == "always" or (plan.reshard_after_forward == "default" and plan.pp == 1)


def reduces_once(plan: Plan) -> bool:
    """Return True if micro-batches' gradients are summed before the exchange, as in pipelines."""
    return plan.pp > 1


def accumulates_full_gradients(plan: Plan) -> bool:
    """Return True if they add up as whole tensors beside the shares, which takes memory."""
    return reduces_once(plan) and plan.dp_shard * plan.cp > 1


def memory(
    links: Sequence[ChainLink], plan: Plan, workload: Workload, stage: int, passes: int, boundary: int
) -> MemoryEstimate:  # fmt: skip
    """Predict the memory of a process with ``links``, through ``passes`` micro-batches.

    ``boundary`` bytes cross each cut.
    """
    own = sum(share.shard_numel for _, share, _ in links) * MASTER
    arrived = stages_with_input(plan, stage) * boundary
    before = list(accumulate((cost.saved_activation_bytes for cost, _, _ in links), initial=arrived))
    others = round(max(0.0, max_in_flight(plan, stage, passes) / stages_per_rank(plan) - 1) * before[-1])
    whole = (
        sum(share.full_numel for _, share, _ in links) * MASTER
        if passes > 1 and accumulates_full_gradients(plan)
        else 0
    )
    done = [0, *accumulate(share.shard_numel * MASTER for _, share, _ in reversed(links))][::-1]
    stays = 0 if reshards(plan) and not plan.only_replicates else sum(share.gathered for _, share, _ in links)
    fixed = {"parameters": own, "optimizer": own * (workload.moments + 2 * plan.independent_replicas)}
    moments = [MemoryEstimate(**fixed, gradients=own, gathered=whole)]
    fixed["in_flight"] = others
    for i in _turns(links):
        cost, share, last = links[i]
        several = (0 if whole else own) if passes > 1 else 0
        now = {**fixed, "gathered": whole + (stays or _gathered(links, i, +1)), "gradients": several}
        moments.append(_moment(now, before[i], cost.forward_peak, last))
        ready = several if passes > 1 else done[i + 1]
        reducing = links[i + 1][1].exchanged * MASTER if i + 1 < len(links) and not whole else 0
        now = {**fixed, "gathered": whole + (stays or _gathered(links, i, -1)) + reducing, "gradients": ready}
        gradients = share.full_numel * share.size
        moments.append(_moment(now, before[i], cost.backward_peak, last, gradients))
        if share.exchanged and not whole:
            now = {
                **fixed,
                "gathered": (stays or _gathered(links, i, 0)) + share.exchanged * MASTER,
                "gradients": ready,
            }
            moments.append(_moment(now, before[i], gradients, last, gradients))
    return max(moments, key=lambda moment: moment.total)


def _turns(links: Sequence[ChainLink]) -> list[int]:
    """Find links where something changes: within a row of equal ones the ends tell the most."""
    count = len(links)
    return [
        i for i in range(count)
        if min(i, count - 1 - i) < 2 or any(links[i + a] is not links[i + a + 1] for a in (-2, -1, 0, 1))
    ]  # fmt: skip


def _moment(now: dict[str, int], before: int, peak: int, last: bool, gradients: int = 0) -> MemoryEstimate:
    """Return the memory while one link uses ``peak`` bytes, on top of earlier links.

    ``gradients`` of them are gradients that are whole.
    """
    now = {**now, "gathered": now["gathered"] + gradients}
    peak -= gradients
    return MemoryEstimate(**now, activations=before + (0 if last else peak), logits=peak if last else 0)


def _gathered(links: Sequence[ChainLink], i: int, ahead: int) -> int:
    """Return the bytes of gathered weights while link ``i`` computes.

    The next one's are on their way, and the last link's stay.
    """
    root = links[-1][1].gathered if links[-1][2] and i + 1 < len(links) else 0
    next_one = i + ahead if ahead else -1
    coming = links[next_one][1] if 0 <= next_one < len(links) - bool(root) else None
    return root + links[i][1].gathered + (coming.exchanged * coming.size if coming is not None else 0)
