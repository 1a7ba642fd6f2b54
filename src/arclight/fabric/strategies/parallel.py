"""Several processes: how they start, find each other and exchange values. What they share is a subclass's matter."""

from __future__ import annotations

import atexit
import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from arclight.fabric.environments import LightningEnvironment
from arclight.fabric.launchers import Launcher, MultiProcessingLauncher, SubprocessLauncher, leave_group
from arclight.fabric.strategies.base import Strategy
from arclight.fabric.watching import start_watch

_REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ParallelStrategy(Strategy):
    """Processes in one group.

    ``start_method`` is how local processes start: ``popen`` runs this command again, ``spawn`` and ``fork``
    run the one function. Every collective waits at most ``timeout``.
    """

    def __init__(
        self,
        *,
        start_method: str = "popen",
        timeout: datetime.timedelta = datetime.timedelta(minutes=10),
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__()
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} is not known; choose popen, spawn, fork or forkserver")
        self.start_method, self.timeout, self.process_group_backend = start_method, timeout, process_group_backend
        self._children: SubprocessLauncher | None = None
        self._turns = 0

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
        share_threads(self.num_devices)
        if not dist.is_initialized():
            dist.init_process_group(
                self.process_group_backend or default_backend(self.device),
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

    # -- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        # Over the store and not by a collective, whose time is limited: rank 0 may be fetching a large file.
        self._turns += 1
        done = f"arclight/first/{self._turns}/{self.node_rank if local else 'all'}"
        store = dist.distributed_c10d._get_default_store()
        first = (self.local_rank if local else self.global_rank) == 0
        while not first and not store.check([done]):
            time.sleep(0.05)
        try:
            yield
        finally:
            if first:
                store.set(done, "1")

    def broadcast(self, value: Any, src: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        name = (
            "mean" if reduce_op == dist.ReduceOp.AVG else reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        )
        name = {"avg": "mean"}.get(name, name)
        if isinstance(name, str) and name not in _REDUCE:
            raise ValueError(f"all_reduce reduce_op={reduce_op!r} is not known; choose one of {', '.join(_REDUCE)}")
        result = tensor.detach().clone()
        dist.all_reduce(result, _REDUCE.get(name, name), group=group)
        return result / dist.get_world_size(group) if name == "mean" else result

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if sync_grads and torch.is_grad_enabled():
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor.contiguous(), group or dist.group.WORLD))
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes > 0)


def default_backend(device: torch.device) -> str:
    """The kind of process group in which tensors on such a device are exchanged."""
    return str(dist.Backend.default_device_backend_map.get(device.type, "gloo"))


def share_threads(num_processes: int) -> None:
    """Divide the cores of this host among its processes, unless OMP_NUM_THREADS already says how many each may use."""
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # processes started from here, loaders' workers too
