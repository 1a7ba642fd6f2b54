"""Processes that train copies of a model on their own."""

from __future__ import annotations

from typing import Any

from arclight.fabric.strategies.parallel import ParallelStrategy


class ReplicaStrategy(ParallelStrategy):
    """Every process trains its own copy on its own share of the data; steps exchange nothing.

    Something else has to bring the copies together, such as :class:`arclight.trainer.callbacks.DiLoCo`. In a checkpoint
    plain tensors are those of rank 0; what differs between processes is saved by each as its share of a DTensor.
    """

    name = "replicas"
    _mesh: Any = None

    @property
    def replica_mesh(self) -> Any:
        """One dimension: every process is a replica. A collective when it is first asked for."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("replica",))
        return self._mesh

    def portable(self, tree: Any) -> Any:
        from arclight.fabric.distributed.sharding import gather_tree

        return gather_tree(tree, keep=self.is_global_zero)

    def write_checkpoint(self, io: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if hasattr(io, "save_shares"):
            io.save_shares(checkpoint, path, self)
        else:
            super().write_checkpoint(io, checkpoint, path, storage_options)
