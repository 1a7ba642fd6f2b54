"""Run a model that the user shards over a mesh by ``configure_model`` or ``parallelize_fn``.

``strategy="model_parallel"`` makes one (`strategy_registry`), or users do. It makes the mesh; the user shards the model over it (under
Fabric only by ``parallelize_fn``); it then places, clips and saves the model. Names and arguments are Lightning's and stay.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight._intervals import PositiveInt, check
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies.parallel import DEFAULT_TIMEOUT
from arclight.fabric.strategies.root_module import sum_on_gloo
from arclight.fabric.strategies.sharded import ShardedStrategy


class ModelParallelStrategy(ShardedStrategy):
    """Strategy for a model that the user shards by tensor parallelism and FSDP2.

    The strategy makes the mesh, with the dimensions ``data_parallel`` and ``tensor_parallel``. ``parallelize_fn(model, device_mesh)``
    returns the model with ``parallelize_module`` and ``fully_shard`` applied to its parts; under a Trainer the module's
    ``configure_model`` may do that instead, on ``self.device_mesh``. Processes of one tensor-parallel group get the same data. ``"auto"``
    sizes are the number of nodes for data and of devices in a node for tensors. A model that was made on the meta device gets its values
    after it was sharded. ``save_distributed_checkpoint`` lets each process write its shards; False lets rank 0 write full tensors. Both
    open on any number of processes.
    """

    name = "model_parallel"

    def __init__(
        self, parallelize_fn: Callable[[Any, Any], nn.Module] | None = None, data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto", save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None, timeout: datetime.timedelta | None = DEFAULT_TIMEOUT, *,
        start_method: str = "popen", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            start_method=start_method, timeout=timeout, process_group_backend=process_group_backend, **options
        )
        self.parallelize_fn = parallelize_fn
        check("data_parallel_size", data_parallel_size, PositiveInt | str)
        check("tensor_parallel_size", tensor_parallel_size, PositiveInt | str)
        self.data_parallel_size, self.tensor_parallel_size = data_parallel_size, tensor_parallel_size
        self.saves_shards = save_distributed_checkpoint
        self._device_mesh: Any = None
        self._placed: set[nn.Module] = set()

    @property
    def device_mesh(self) -> Any:
        """The mesh. Raises RuntimeError before the processes have found each other."""
        if self._device_mesh is None:
            raise RuntimeError(
                "Accessing the device mesh before processes have initialized is not allowed: call fabric.launch() first, or ask "
                "for it in configure_model"
            )
        return self._device_mesh

    @property
    def replica_mesh(self) -> Any:
        """The mesh: weights not sharded over ``data_parallel`` are not kept equal along it."""
        return self.device_mesh

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._device_mesh is not None:
            return
        from torch.distributed.device_mesh import init_device_mesh

        data = self.num_nodes if self.data_parallel_size == "auto" else int(self.data_parallel_size)
        tensor = self.num_devices if self.tensor_parallel_size == "auto" else int(self.tensor_parallel_size)
        if data * tensor != self.world_size:
            raise RuntimeError(
                f"data_parallel_size={data} and tensor_parallel_size={tensor} multiplied should equal the world size, which is "
                f"{self.world_size}"
            )
        names = ("data_parallel", "tensor_parallel")
        self._device_mesh = init_device_mesh(self.device.type, (data, tensor), mesh_dim_names=names)

    @property
    def evaluates_together(self) -> bool:  # type: ignore[override]
        """Return True if the user sharded weights by ``fully_shard``, whose forwards gather them."""
        from torch.distributed.fsdp import FSDPModule

        return self.lightning_module is not None and any(
            isinstance(part, FSDPModule) for part in self.lightning_module.modules()
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    # -- model -----------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        from arclight.fabric.distributed import sharding

        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            raise TypeError(
                f"{type(self).__name__} only supports the new FSDP2 APIs in PyTorch >= 2.4 (fully_shard); the model has parts "
                "wrapped in FullyShardedDataParallel"
            )
        if torch.distributed.is_initialized():
            sharding.copy_from_rank_zero(module, self.device)
        if self.parallelize_fn is not None:
            module = self.parallelize_fn(module, self.device_mesh)
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"The `parallelize_fn` must return a `nn.Module` instance, the model; it returned {type(module).__name__}"
                )
        self._finish(module)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        from arclight.fabric.distributed.sharding import replace_parameters

        before = dict(module.named_parameters())
        prepared = self.setup_module(module)
        after = dict(prepared.named_parameters())
        replaced = {parameter: after[name] for name, parameter in before.items() if name in after}
        for optimizer in optimizers:
            replace_parameters(optimizer, replaced)
        return prepared, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def place(self, module: nn.Module, whole_step: bool = True) -> None:
        if module in self._placed:
            return
        if self.parallelize_fn is not None:
            if self.setup_module(module) is not module:
                raise TypeError("under a Trainer, parallelize_fn must change the module in place and return it")
        else:
            self._finish(module)
        self._placed.add(module)

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

        if not isinstance(module, FSDPModule):
            return step
        register_fsdp_forward_method(module, step.__name__)  # of a module that is a unit itself, each step is a forward
        found: Callable[..., Any] = getattr(module, step.__name__)
        return found

    wrap_evaluation_step = wrap_step

    def average_gradients(self, module: nn.Module) -> None:
        """Do nothing: the user's FSDP units average in backward."""

    def _finish(self, module: nn.Module) -> None:
        """Finish the set-up of a sharded model."""
        from torch.distributed.fsdp import FSDPModule

        from arclight.fabric.distributed import sharding

        sharding.materialize(module, self.device)
        for tensor in (*module.parameters(), *module.buffers()):
            if not hasattr(tensor, "to_local") and tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)
        if torch.distributed.is_initialized():
            sum_on_gloo(module)
            replicas = self.device_mesh["data_parallel"].size()
            if replicas > 1 and not any(isinstance(part, FSDPModule) for part in module.modules()):
                rank_zero_warn(
                    f"data_parallel_size={replicas}, but no part of the model is shared over that dimension: apply fully_shard "
                    'with mesh=device_mesh["data_parallel"], or gradients stay different on each process'
                )
        sharding.accept_full_weights(module)
