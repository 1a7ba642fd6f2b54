"""Data parallelism: every process holds the whole model and sees its own share of each global batch."""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from arclight.fabric.environments import LightningEnvironment
from arclight.fabric.launchers import Launcher, MultiProcessingLauncher, SubprocessLauncher, leave_group
from arclight.fabric.strategies.base import Strategy
from arclight.fabric.watching import start_watch

_REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class DDPStrategy(Strategy):
    """torch's DistributedDataParallel; gradients are averaged over ranks.

    ``start_method`` is how local processes start: ``popen`` runs this command again, ``spawn`` and ``fork``
    run the one function. Further keyword arguments go to DistributedDataParallel.
    Every collective waits at most ``timeout``.
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
        super().__init__()
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} is not known; choose popen, spawn, fork or forkserver")
        self.start_method, self.timeout, self.process_group_backend, self.ddp = (
            start_method,
            timeout,
            process_group_backend,
            ddp,
        )
        self._children: SubprocessLauncher | None = None

    def launcher(self) -> Launcher:
        if self._children is not None:  # one set of children serves every fit and test of this program
            return self._children
        if self.environment.creates_processes_externally:
            return Launcher()
        if self.start_method == "popen":
            self._children = SubprocessLauncher(self.num_devices, self.environment)
            return self._children
        return MultiProcessingLauncher(self.num_devices, self.start_method)

    def setup_environment(self) -> None:
        if isinstance(self.environment, LightningEnvironment):
            self.environment.set_world_size(self.num_devices * self.num_nodes)
            self.environment.set_global_rank(self.node_rank * self.num_devices + self.local_rank)
        super().setup_environment()
        if not dist.is_initialized():
            dist.init_process_group(
                self.process_group_backend or self.accelerator.backend,
                init_method=f"tcp://{self.environment.main_address}:{self.environment.main_port}",
                world_size=self.world_size,
                rank=self.global_rank,
                timeout=self.timeout,
            )
            atexit.register(leave_group)
            store = dist.distributed_c10d._get_default_store()
            start_watch(store, self.global_rank, self.world_size, self.timeout.total_seconds(), self.stop)

    @property
    def world_size(self) -> int:
        return self.environment.world_size()

    @property
    def global_rank(self) -> int:
        return self.environment.global_rank()

    @property
    def local_rank(self) -> int:
        return self.environment.local_rank()

    # -- model -------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, **self.ddp)

    def setup_module(self, module: nn.Module, move: bool = True) -> nn.Module:
        module = super().setup_module(module, move)
        return self.wrap(module) if any(p.requires_grad for p in module.parameters()) else module

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

    # -- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, name: str = "") -> None:
        dist.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        if op not in _REDUCE:
            raise ValueError(f"all_reduce op={op!r} is not known; choose one of {', '.join(_REDUCE)}")
        result = tensor.detach().clone()
        dist.all_reduce(result, _REDUCE[op])
        return result / self.world_size if op == "mean" else result

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes > 0)


class _StepModule(nn.Module):
    """A module whose forward is another module's step, so that DDP's forward runs that step."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.step = step

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.step(*arguments, **options)
