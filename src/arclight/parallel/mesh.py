"""Build a plan's device meshes: its dimensions, as parameters shard, and as experts shard.

`PlanStrategy` makes one for a plan, or `parallelize` for a plan given to it; ``parallel.model``, ``parallel.layers`` and the pipeline take
process groups and sub-meshes from it. All process groups of a plan are made here, on all ranks in one order. These modules ask
for dimensions by name (``pp``, ``dp_replicate``, ``fsdp``, ``ep``, ``tp``, ...): names stay.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from arclight.parallel.plan import Plan, PlanError


class Mesh:
    """Mesh of the processes of ``plan``; all of them must make it at the same time.

    Dimensions of size 1 are there too. Raises PlanError if the number of processes is another, or they have not
    found each other.
    """

    def __init__(self, plan: Plan, device_type: str = "cpu") -> None:
        if not dist.is_initialized():
            raise PlanError(
                "the processes of the plan have not found each other: call torch.distributed.init_process_group first, or let a "
                "Trainer or Fabric do so with strategy=plan"
            )
        plan.check(world_size=dist.get_world_size())
        self.plan, self.device_type = plan, device_type
        self.grid = init_device_mesh(
            device_type,
            (plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        )
        """The plan's own dimensions."""
        self.dense = init_device_mesh(
            device_type,
            (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        """The same processes as parameters see them: ``fsdp`` is dp_shard * cp."""
        self.sparse: DeviceMesh | None = None
        """The same processes as parameters of experts see them: dp_shard * cp is ``efsdp`` times ``ep``; None for ep = 1."""
        if plan.ep > 1:
            self.sparse = init_device_mesh(
                device_type,
                (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp // plan.ep, plan.ep, plan.tp),
                mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep", "tp"),
            )
        self.replica: Any = None
        """The group of the processes of this one's replica if replicas are independent, else None."""
        self._loss: Any = None
        if plan.independent_replicas:
            shape, names = (plan.dp_replicate, plan.world_size // plan.dp_replicate), ("dp_replicate", "replica")
            self.replica = init_device_mesh(device_type, shape, mesh_dim_names=names).get_group("replica")
        elif 1 < plan.data_parallel * plan.cp < plan.world_size:
            sizes = (plan.pp, plan.data_parallel * plan.cp, plan.tp)
            self._loss = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "loss", "tp")).get_group("loss")

    def rank(self, dimension: str) -> int:
        """Return the place of this process along a dimension of the plan."""
        return self.grid.get_local_rank(dimension)

    def group(self, dimension: str) -> Any:
        """Return the processes that differ from this one along a dimension of the plan only."""
        return self.grid.get_group(dimension)

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Mesh over which parameters are sharded.

        It has a first dimension of replicas if any are kept equal.
        """
        return self.dense["dp_replicate", "fsdp"] if self.copies else self.dense["fsdp"]

    @property
    def copies(self) -> bool:
        """Return True for weights with copies that every step keeps alike."""
        return self.plan.dp_replicate > 1 and not self.plan.independent_replicas

    def replicate_mesh(self, own: DeviceMesh | None) -> DeviceMesh:
        """Return ``own``, a mesh within one replica, with all replicas as first dimension.

        None for ``own``: the tensor is whole.
        """
        names = (own.mesh_dim_names or ()) if own is not None else ()
        root = self.dense if self.sparse is None or not {"efsdp", "ep"} & set(names) else self.sparse
        return root[("dp_replicate", *names)]

    @property
    def data_rank(self) -> int:
        """Number the share of the samples, of the plan's ``data_parallel``, that this process reads."""
        return self.rank("dp_replicate") * self.plan.dp_shard + self.rank("dp_shard")

    @property
    def loss_group(self) -> Any:
        """Process group of ranks with other tokens and the same layers; None for this rank alone.

        It is dp * cp, of one replica if replicas are independent.
        """
        if self.plan.independent_replicas:
            return self.dense.get_group("fsdp") if self.plan.dp_shard * self.plan.cp > 1 else None
        if self._loss is None and self.plan.world_size == self.plan.data_parallel * self.plan.cp > 1:
            return dist.group.WORLD
        return self._loss
