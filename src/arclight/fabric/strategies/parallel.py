"""Define the base of parallel strategies: launch, rendezvous and collectives.

`ddp`, `sharded` (and so the strategies of ``arclight.parallel``) and `ReplicaStrategy` derive from it. Users' subclasses may override
methods, of which many have Lightning's names: they stay. Every rank must make the same collective calls in the same order.
"""

from __future__ import annotations

import atexit
import datetime
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.distributed.rendezvous import agree_on_attempt, open_rendezvous_store, reuses_agent_store
from arclight.fabric.distributed.store_gather import StoreGather
from arclight.fabric.distributed.watchdog import FAILED_KEY, carry_stop_signal, start_watchdog
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.launchers import (
    Launcher,
    MultiProcessingLauncher,
    RankFailedError,
    SubprocessLauncher,
    divide_threads,
    leave_group,
)
from arclight.fabric.precision import Precision
from arclight.fabric.rank_zero import rank_zero_only
from arclight.fabric.strategies.base import Strategy

DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)
"""How long a collective waits for the slowest process."""

_DESCRIPTION = 128
"""Bytes of the message by which `verify_same_across_ranks` compares a tensor's shape and type."""

_REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ParallelStrategy(Strategy):
    """Base class of strategies with several processes in one group.

    ``start_method`` is how local processes start: ``popen`` runs this command again; ``spawn``, ``fork`` and ``forkserver``
    run the one function. Every collective waits at most ``timeout``; a process that others wait for is named on standard
    error when half of it has passed. ``process_group_backend`` is gloo for processors and nccl for CUDA devices by default.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        *,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision, precision_plugin)
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ValueError(f"start_method={start_method!r} is not known; choose popen, spawn, fork or forkserver")
        self.parallel_devices, self.cluster_environment = parallel_devices, cluster_environment
        self._start_method, self.timeout, self.process_group_backend = start_method, timeout, process_group_backend
        self._launcher: Launcher | None = None
        self._turns = self._exchanges = 0

    def attach(
        self, accelerator: Accelerator, parallel_devices: list[torch.device], num_nodes: int, environment: ClusterEnvironment
    ) -> None:  # fmt: skip
        super().attach(accelerator, parallel_devices, num_nodes, environment)
        self.set_world_ranks()

    @property
    def root_device(self) -> torch.device:
        return (self.parallel_devices or [torch.device("cpu")])[self.local_rank if self.parallel_devices else 0]

    @property
    def launcher(self) -> Launcher:
        if self._launcher is None:  # one set of processes serves every fit and test of this program
            assert self.cluster_environment is not None  # attach() has been called
            if self._start_method == "popen" or self.cluster_environment.creates_processes_externally:
                self._launcher = SubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            else:
                self._launcher = MultiProcessingLauncher(
                    self.cluster_environment, self.num_processes, self._start_method
                )
        return self._launcher

    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()
        divide_threads(self.num_processes)
        self.setup_distributed()

    def set_world_ranks(self) -> None:
        """Set ranks in the program's own environment; a cluster's environment knows better."""
        environment = self.cluster_environment
        assert environment is not None
        environment.set_global_rank(self.node_rank * self.num_processes + environment.local_rank())
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = (
            self.global_rank
        )  # nothing else informs the first process of another node that it is not rank 0

    def _get_process_group_backend(self) -> str:
        return self.process_group_backend or default_backend(self.root_device)

    def setup_distributed(self) -> None:
        """Join the process group, unless this process is in one."""
        assert self.cluster_environment is not None
        if dist.is_initialized():
            carry_stop_signal(self.stop)
            return
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        timeout = self.timeout or DEFAULT_TIMEOUT
        if "nccl" in self._get_process_group_backend():
            record_flights()
        rank, world_size = self.global_rank, self.world_size
        if reuses_agent_store():
            kept, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
            name = agree_on_attempt(kept, rank, world_size, timeout.total_seconds())
            own = dist.distributed_c10d.PrefixStore(f"arclight/{name}", kept)
        else:
            environment = self.cluster_environment
            kept = open_rendezvous_store(environment.main_address, environment.main_port, rank, world_size, timeout)
            own = dist.distributed_c10d.PrefixStore("default_pg", kept)
        dist.init_process_group(
            self._get_process_group_backend(),
            store=own,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=self.root_device if self.root_device.type == "cuda" else None,
        )
        atexit.register(leave_group)
        store = dist.distributed_c10d._get_default_store()
        start_watchdog(store, rank, world_size, timeout.total_seconds(), self.stop)

    @property
    def world_size(self) -> int:
        return self.cluster_environment.world_size() if self.cluster_environment is not None else 1

    @property
    def global_rank(self) -> int:
        return self.cluster_environment.global_rank() if self.cluster_environment is not None else 0

    @property
    def local_rank(self) -> int:
        return self.cluster_environment.local_rank() if self.cluster_environment is not None else 0

    # -- collectives -----------------------------------------------------------------------------------------------

    # Before the processes have been started this one is alone: it then has no other rank to wait for.

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if cuda else None)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        # Over the store and not by a collective, whose time is limited: rank 0 may be fetching a large file.
        self._turns += 1
        done = f"arclight/first/{self._turns}/{self.node_rank if local else 'all'}"
        store = dist.distributed_c10d._get_default_store()
        first = (self.local_rank if local else self.global_rank) == 0
        while not first and not store.check([done]):
            if store.check([FAILED_KEY]):
                raise RankFailedError(
                    f"rank {store.get(FAILED_KEY).decode()} failed while this one waited for the first of all"
                )
            time.sleep(0.05)
        try:
            yield
        finally:
            if first:
                store.set(done, "1")

    def broadcast(self, value: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return value
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

    def verify_same_across_ranks(self, tensor: torch.Tensor, group: Any, operation: str) -> None:
        if tensor.device.type != "cpu" and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
            return
        text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}".encode()[:_DESCRIPTION]
        own = torch.frombuffer(bytearray(text.ljust(_DESCRIPTION)), dtype=torch.uint8).to(tensor.device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        if any(not torch.equal(part, own) for part in parts):
            given = [bytes(part.tolist()).decode().strip() for part in parts]
            values = ", ".join(f"rank {rank} has {one}" for rank, one in enumerate(given))
            raise ValueError(
                f"{operation} needs tensors of one shape and type, but {values}: pad them to one shape (and cut the result), or gather "
                "them as objects: torch.distributed.all_gather_object"
            )

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        self.verify_same_across_ranks(tensor, group, "all_gather")
        if sync_grads and torch.is_grad_enabled():
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor.contiguous(), group or dist.group.WORLD))
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    def exchange(self, name: str, timeout: float) -> StoreGather | None:
        if not dist.is_initialized():
            return None
        self._exchanges += 1
        store: Any = dist.distributed_c10d._get_default_store()
        return StoreGather(store.clone(), self.global_rank, self.world_size, timeout, f"{name}-{self._exchanges}")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes > 0)


def record_flights() -> None:
    """Turn on NCCL's flight recorder, to dump the last collectives when one hangs.

    Variables that are set already stay as they are; the files go to the folder for temporary files.
    """
    place = os.path.join(tempfile.gettempdir(), f"arclight-{os.environ.get('MASTER_PORT', '0')}-collectives-of-rank-")
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"), ("TORCH_FR_DUMP_TEMP_FILE", place),
    ):  # fmt: skip
        os.environ.setdefault(name, value)


def default_backend(device: torch.device) -> str:
    """Return the process group backend for tensors on such a device."""
    return str(dist.Backend.default_device_backend_map.get(device.type, "gloo"))


class ReplicaStrategy(ParallelStrategy):
    """Every process trains its own replica on its own share of the data; steps exchange nothing.

    Something else has to synchronise the replicas, such as :class:`arclight.trainer.callbacks.DiLoCo`. In a checkpoint
    plain tensors are those of rank 0; what differs between processes is saved by each as its shard of a DTensor.
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
        if getattr(io, "save_shards", None) is not None:
            io.save_shards(checkpoint, path, self)
        else:
            super().write_checkpoint(io, checkpoint, path, storage_options)
