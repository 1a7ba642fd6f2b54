"""Shard a link's parameters over processes as FSDP does.

`estimates` calls `fsdp_shards_of` for each plan. In: a `Chain` and a `Plan`; out: elements of each kind of link that one rank shards,
gathers and sums, from which `memory` and `timing` compute bytes. It must follow `model.fsdp` and `expert_parallel`: ``arclight plan
--verify`` compares it with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.planning.chain import Chain, Parameters
from arclight.parallel.planning.sharded_shapes import LayerSharding

MASTER = 4
"""Bytes of an element of the weights that are kept, of their gradients and of each moment: float32."""


@dataclass(frozen=True)
class FsdpShard:
    """Parameters of one link on one rank, counted in elements unless named otherwise."""

    full_numel: int
    """Elements of the gathered parameters."""
    shard_numel: int
    """Elements of this rank's shard: parameters are cut into equal numbers of rows, the last shard padded."""
    parts: int
    """Ranks that they are sharded over."""
    size: int
    """Bytes of a gathered element."""
    has_compute_copy: bool = True
    """Whether compute uses a copy beside the shard: FSDP's gathered weights, even on one rank, or another dtype."""
    summed: tuple[int, ...] = ()
    """Elements of each parameter whose gradient is summed over ``tp``."""
    expert_shard_numel: int = 0
    """Elements of ``shard_numel`` that are experts', which ``ep`` shards."""
    expert_parts: int = 1
    """Ranks that those are sharded over."""

    @property
    def gathered(self) -> int:
        """Bytes of the gathered weights of forward and backward, beside the shard.

        It is 0 if they use the shard itself.
        """
        return self.full_numel * self.size if self.has_compute_copy else 0

    @property
    def exchanged(self) -> int:
        """Elements that a gathering or scattering moves, padding included."""
        dense = (self.shard_numel - self.expert_shard_numel) * self.parts if self.parts > 1 else 0
        return dense + (self.expert_shard_numel * self.expert_parts if self.expert_parts > 1 else 0)


def fsdp_shards_of(chain: Chain, plan: Plan) -> dict[str | int, FsdpShard]:
    """Return the shards by kind of link. Raises PlanError for experts that do not divide."""
    parameters = chain.parameters(LayerSharding.of(plan))
    return {kind: _share(one, plan, chain.workload.compute.itemsize) for kind, one in parameters.items()}


def _share(parameters: Parameters, plan: Plan, size: int) -> FsdpShard:
    parts = plan.dp_shard * plan.cp
    own = sum(-(-shape[0] // parts) * prod(shape[1:]) if shape else 1 for shape in parameters.shapes)
    left = parts // plan.ep
    for shape in parameters.experts:
        if all(length % left for length in shape[1:]):
            raise PlanError(f"experts of {shape[1:]} do not divide by dp_shard * cp / ep = {left}: use a larger ep")
    experts = sum(prod(shape) // left for shape in parameters.experts)
    summed = tuple(map(prod, parameters.replicated)) if plan.tp > 1 else ()
    has_copy = not plan.only_replicates or size != MASTER
    return FsdpShard(parameters.elements, own + experts, parts, size, has_copy, summed, experts, left)
