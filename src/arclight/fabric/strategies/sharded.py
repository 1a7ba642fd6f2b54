"""Define the base of sharding strategies (FSDP, model parallel, plans).

`FSDPStrategy`, `ModelParallelStrategy` and `PlanStrategy` derive from it; ``deploy.quantizing.callback``, the checkpoint history and
`StochasticWeightAveraging` ask for the class to know that weights are sharded. Its checkpoints open on one device and on any mesh.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.batches import map_tensors
from arclight.fabric.distributed.optimizer_names import add_parameter_names, key_by_name
from arclight.fabric.strategies.parallel import ParallelStrategy


class ShardedStrategy(ParallelStrategy):
    """Base class of strategies that shard a model (DTensors) or divide it among ranks."""

    evaluates_in_inference_mode = False
    saves_shards = True
    """Whether each process writes its own shards into a checkpoint; else they are gathered and rank 0 writes all."""

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: sharding moves it, as a full model may be too large for one device."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which new modules are on the host, or on meta if ``empty_init``."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        from arclight.fabric.distributed.sharding import accept_full_optimizer_state

        accept_full_optimizer_state(optimizer)
        return optimizer

    def clip_norm(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        from arclight.fabric.distributed import sharding

        return sharding.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: list[torch.Tensor], limit: float) -> None:
        from arclight.fabric.distributed import sharding

        sharding.clip_value(parameters, limit)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        return _without_sync(self.root_of(module)) if enabled else nullcontext()

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return no context, so that gradients are reduced batch by batch.

        Unreduced ones would take the memory of the full model, and a checkpoint within the window would not have them.
        """
        return nullcontext()

    def root_of(self, module: nn.Module) -> nn.Module:
        """Return the outermost module around ``module`` that takes part in its forward."""
        return module

    def share_of(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        from arclight.fabric.distributed import sharding

        return sharding.shard_like(whole, like)

    def portable(self, tree: Any) -> Any:
        from arclight.fabric.distributed.sharding import gather_tree

        return gather_tree(tree, keep=self.is_global_zero)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, self.own_weights(module, state_dict), strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}.save_checkpoint(..., storage_options=...)` is not supported: processes write their "
                "shards into a folder that all of them see"
            )
        super().save_checkpoint(path, state, filter=filter)

    def read_checkpoint(self, io: Any, path: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint with lazy tensors, of which each process reads its shard."""
        if getattr(io, "load_shards", None) is not None and not self.broadcast(os.path.isfile(path)):
            found: dict[str, Any] = io.load_shards(path, self)
            return found
        return super().read_checkpoint(io, path, **options)

    def in_memory(self, tree: Any) -> Any:
        return map_tensors(tree, lambda tensor: tensor.read() if hasattr(tensor, "read") else tensor)

    def restore(self, target: Any, state: Any, strict: bool = True) -> None:
        from arclight.fabric.distributed.sharding import accept_full_optimizer_state

        if isinstance(target, Optimizer):  # also one that was not set up by this strategy
            accept_full_optimizer_state(target)
        super().restore(target, state, strict)

    def named_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], names: Mapping[torch.Tensor, str]
    ) -> dict[str, Any]:
        """Key the optimizer's state by parameter name if processes hold different parameters."""
        named = add_parameter_names(optimizer, state, names)
        members = [group.get("param_names", len(group["params"])) for group in named["param_groups"]]
        everyones = self.all_gather_object(hashlib.sha256(repr(members).encode()).hexdigest())
        return named if len(set(everyones)) == 1 else key_by_name(named)

    def write_checkpoint(self, io: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.saves_shards and getattr(io, "save_shards", None) is not None:
            io.save_shards(checkpoint, path, self)
        else:
            super().write_checkpoint(io, checkpoint, path, storage_options)

    def own_weights(self, module: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Drop ``weights`` that only other processes' modules have; every rank calls this."""
        own = list(module.state_dict())
        everyones = self.all_gather_object(hashlib.sha256(repr(own).encode()).hexdigest())
        if len(set(everyones)) == 1:
            return weights
        elsewhere = {name for names in self.all_gather_object(own) for name in names} - set(own)
        return {name: value for name, value in weights.items() if name not in elsewhere}


@contextmanager
def _without_sync(module: nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        for part in parts:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True, recurse=False)
