"""Data parallelism: every process holds the whole model and sees its own share of each global batch."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from arclight.fabric.strategies.parallel import ParallelStrategy


class DDPStrategy(ParallelStrategy):
    """torch's DistributedDataParallel; gradients are averaged over ranks.

    Keyword arguments beyond those of :class:`ParallelStrategy` go to DistributedDataParallel.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        start_method: str = "popen",
        timeout: datetime.timedelta = datetime.timedelta(minutes=10),
        process_group_backend: str | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(start_method=start_method, timeout=timeout, process_group_backend=process_group_backend)
        self.ddp = ddp

    # -- model -------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(module=module, device_ids=device_ids, **self.ddp)

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.wrap(module) if any(p.requires_grad for p in module.parameters()) else module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(module.module if isinstance(module, DistributedDataParallel) else module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        bare = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(bare, state_dict, strict)

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        return self.wrap(_StepModule(module, step))

    def copy_weights(self, module: nn.Module) -> None:
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)

    def average_gradients(self, module: nn.Module) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, work in zip(gradients, works, strict=True):
            work.wait()
            gradient /= self.world_size

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


class _StepModule(nn.Module):
    """A module whose forward is another module's step, so that DDP's forward runs that step."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.step = step

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.step(*arguments, **options)
