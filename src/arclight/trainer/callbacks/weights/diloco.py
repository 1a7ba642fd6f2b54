"""Train replicas by DiLoCo: many local steps, then one step of an outer optimizer.

Users pass it to a Trainer with independent replicas, a recipe's ``[diloco]`` makes it. The outer step is ``optim.outer``; keys of its
state are in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from arclight._intervals import PositiveFloat, ProperFraction, check
from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.fabric.errors import MisconfigurationError
from arclight.optim import restore_optimizer
from arclight.optim.outer import Outer, due, fragments_of, pseudo_gradient
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class DiLoCo(Callback):
    """Train replicas for ``sync_every`` local steps, then all-reduce their pseudo-gradients.

    The mean of (anchor - local weights) is a gradient for an outer SGD with Nesterov momentum, whose result, the new anchor, every
    replica goes on from (Douillard et al. 2023). With ``fragments`` the blocks of the model take turns, so that each exchange is
    a part of it (Douillard et al. 2025). Optimizer states stay with their replica.

    It needs a strategy whose steps exchange nothing between replicas: ``strategy="replicas"``, where each process is one, a
    ``Plan(dp_replicate=..., replicas="independent")``, where each group is one, sharded over its processes, or a
    ``ModelParallelStrategy`` that shares nothing out over ``data_parallel``. A checkpoint has the anchor as the model's weights and
    all that the replicas differ in, so a run goes on with the same bits between exchanges too; with another number of
    replicas all begin at the anchor.
    """

    def __init__(
        self,
        sync_every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
    ) -> None:
        if sync_every < 1 or not 1 <= fragments <= sync_every:
            raise ValueError(
                f"sync_every={sync_every} and fragments={fragments}: each fragment needs a step of its own among sync_every"
            )
        check("outer_lr", outer_lr, PositiveFloat)
        check("outer_momentum", outer_momentum, ProperFraction)
        self.sync_every, self.fragments = sync_every, fragments
        self.outer = Outer(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._mesh: Any = None
        self._trainer: Any = None
        self._loaded: dict[str, Any] = {}
        self._synced = 0
        self.anchor: dict[str, torch.Tensor] = {}
        """The weights that all replicas agree on; this process's parts if a replica is sharded over several."""
        self.velocity: dict[str, torch.Tensor] = {}

    # -- training --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._trainer, self._mesh = trainer, trainer.strategy.replica_mesh
        if self._mesh is None:
            raise MisconfigurationError(
                f"DiLoCo needs replicas that train independently, but strategy={trainer.strategy.name!r} keeps them alike in every step: "
                'use strategy="replicas", or replicas="independent" in a plan'
            )
        weights = _trainable(pl_module)
        for name, weight in weights.items():
            mesh = weight.device_mesh if is_dtensor(weight) else None  # type: ignore[attr-defined]
            if mesh is not None and mesh.ndim >= trainer.strategy.replicate_mesh(mesh).ndim:
                raise MisconfigurationError(
                    f"{name} is sharded over the replicas themselves, so they cannot train independently: leave {self._mesh.mesh_dim_names[0]} "
                    "out of fully_shard"
                )
        self._parts = fragments_of(weights, self.fragments)
        self._synced = trainer.global_step
        if self._loaded:
            self._restore_replica(trainer, pl_module)
        else:
            group = self._mesh.get_group(0)
            for weight in weights.values():
                value = local_tensor(weight).to(trainer.strategy.device)  # shards may lie in host memory
                dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
                local_tensor(weight).copy_(value)
            self.anchor = {name: local_tensor(weight).clone() for name, weight in weights.items()}
            self.velocity = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._synced:
            return  # a batch of an accumulation window
        self._synced = trainer.global_step
        if turns := due(self._synced, self.sync_every, self.fragments):
            self._exchange(pl_module, [name for turn in turns for name in self._parts[turn]])

    @torch.no_grad()
    def _exchange(self, module: Module, names: list[str]) -> None:
        """Run one outer step of the named parameters."""
        weights = _trainable(module)
        local = {name: local_tensor(weights[name]) for name in names}
        exact = any(weight.dtype == torch.float64 for weight in local.values())
        dtype = torch.float64 if exact else torch.float32
        device = self._trainer.strategy.device
        gradient = _mean(pseudo_gradient(self.anchor, local, names), self._mesh.get_group(0), dtype, device)
        self.anchor, self.velocity = self.outer.step(self.anchor, gradient, self.velocity)
        for name, weight in local.items():
            weight.copy_(self.anchor[name])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state, and the replicas' differing tensors stacked.

        The first dimension of those is the replica.
        """
        if self._mesh is None:
            return self._loaded
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        weights = _trainable(module)
        return {
            "replicas": self._mesh.size(0),
            "anchor": {name: _shard_like_weight(part, weights[name]) for name, part in self.anchor.items()},
            "velocity": {name: _shard_like_weight(part, weights[name]) for name, part in self.velocity.items()},
            "local": {name: self._stacked(tensor) for name, tensor in _differing(module).items()},
            "optimizers": [_each(optimizer.state_dict()["state"], self._stacked) for optimizer in optimizers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def weights_to_save(self, pl_module: Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the anchor: no replica's own weights are what others should open."""
        names = {weight: name for name, weight in _trainable(pl_module).items() if name in self.anchor}
        anchors = {
            name: _shard_like_weight(self.anchor[names[weight]], weight)
            for name, weight in pl_module.named_parameters(remove_duplicate=False)
            if weight in names and name in weights  # tied weights are saved under each name
        }
        return {**weights, **anchors}

    def _stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` of this replica as its shard of all replicas'."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        sharded = is_dtensor(tensor)
        mesh = self._trainer.strategy.replicate_mesh(tensor.device_mesh if sharded else None)  # type: ignore[attr-defined]
        placements: list[Any] = [Replicate()] * (mesh.ndim - 1)
        if sharded:
            placements = [_one_further(placement) for placement in tensor.placements]  # type: ignore[attr-defined]
        shape = torch.Size((self._mesh.size(0), *tensor.shape))
        stride = torch.empty(shape, device="meta").stride()
        part = local_tensor(tensor).detach().contiguous().unsqueeze(0)
        stacked: torch.Tensor = DTensor.from_local(
            part.to(mesh.device_type), mesh, [Shard(0), *placements], run_check=False, shape=shape, stride=stride
        )
        return stacked

    def _restore_replica(self, trainer: Trainer, module: Module) -> None:
        """Restore weights, moments and buffers of this replica.

        If the number of replicas changed, all begin at the anchor.
        """
        from arclight.fabric.distributed.sharding import shard_like

        state, self._loaded = self._loaded, {}
        weights, mine = _trainable(module), self._mesh.get_local_rank(0)

        def part(value: torch.Tensor, name: str) -> torch.Tensor:
            weight = weights[name]
            return local_tensor(shard_like(value.to(weight.device), weight)).to(weight.device).clone()

        self.anchor = {name: part(value, name) for name, value in state["anchor"].items()}
        self.velocity = {name: part(value, name) for name, value in state["velocity"].items()}
        if state["replicas"] != self._mesh.size(0):
            trainer.log_warning(
                f"the checkpoint has {state['replicas']} replicas, this run {self._mesh.size(0)}: all begin at the weights that "
                "those agreed on, with the optimizer state of the first"
            )
            for name, weight in weights.items():
                local_tensor(weight).copy_(self.anchor[name])
            return
        for name, tensor in _differing(module).items():
            own = state["local"][name][mine].to(tensor.device)
            local_tensor(tensor).copy_(local_tensor(shard_like(own, tensor)))
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            own_state = _each(saved, lambda value: value[mine])
            restore_optimizer(optimizer, {**optimizer.state_dict(), "state": own_state})


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _differing(module: nn.Module) -> dict[str, torch.Tensor]:
    """List what may differ between replicas by name: trained weights and saved buffers."""
    saved = module.state_dict()
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: value for name, value in saved.items() if isinstance(value, torch.Tensor) and name not in frozen}


def _shard_like_weight(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a process's part of a tensor that is sharded as ``weight`` is."""
    from arclight.fabric.distributed.sharding import from_local_tensor

    return from_local_tensor(part, weight) if is_dtensor(weight) else part


def _each(state: Mapping[Any, Any], change: Any) -> dict[Any, Any]:
    """Return an optimizer's state with every tensor changed."""
    return {
        key: {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        for key, entries in state.items()
    }


def _one_further(placement: Any) -> Any:
    """Shift a placement by one dimension, for tensors stacked along a new first one."""
    if placement.is_replicate():
        return placement
    # FSDP over tensor parallelism along one dimension is no kind of Shard to Python.
    strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + 1, **strided)


def _mean(
    tensors: dict[str, torch.Tensor], group: Any, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the mean of each tensor over a group, by one all-reduce of ``dtype`` on ``device``."""
    flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors.values()]).to(device)
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts: Iterable[torch.Tensor] = flat.split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view(tensors[name].shape).to(tensors[name].device) for name, part in zip(tensors, parts, strict=True)
    }
