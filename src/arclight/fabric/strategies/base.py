"""What a strategy is: how one model's training is shared between processes. One process is a strategy too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.batches import move_batch
from arclight.fabric.environments import ClusterEnvironment, LightningEnvironment
from arclight.fabric.launchers import Launcher
from arclight.fabric.stopping import StopSignal


class Strategy:
    """One process and one device; subclasses add others.

    A loop asks a strategy for a step function (:meth:`wrap_step`) once, and calls that; a strategy
    that must own the whole step, such as a pipeline schedule, returns its own.
    """

    name = "single"
    accelerator: Accelerator
    device: torch.device

    def __init__(self) -> None:
        self.num_devices = self.num_nodes = 1
        self.environment: ClusterEnvironment = LightningEnvironment()
        self.stop = StopSignal()

    def connect(
        self,
        accelerator: Accelerator,
        num_devices: int,
        num_nodes: int,
        environment: ClusterEnvironment,
        device_ids: list[int] | None = None,
    ) -> None:
        """Take what the user asked for (``device_ids``: which of this node's devices); nothing is touched yet."""
        self.accelerator, self.environment = accelerator, environment
        self.num_devices, self.num_nodes = num_devices, num_nodes
        self.device_ids = device_ids or list(range(num_devices))
        self.device = accelerator.device(self.device_ids[0])

    def launcher(self) -> Launcher:
        return Launcher()

    def setup_environment(self) -> None:
        """Join the other processes and claim this process's device."""
        self.device = self.accelerator.device(self.device_ids[self.local_rank])
        self.accelerator.setup_device(self.device, self.num_devices)

    @property
    def world_size(self) -> int:
        return 1

    @property
    def global_rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return self.environment.node_rank()

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # -- stopping together -----------------------------------------------------------------------------------------

    def request_stop(self, reason: str = "") -> None:
        """Ask all ranks to stop, from any rank, thread or signal handler. See :class:`StopSignal`."""
        self.stop.request(reason)

    def should_stop(self, position: int) -> bool:
        """Whether all ranks stop before whatever follows ``position``; every rank asks at the same positions, in order."""
        return self.stop.due(position)

    # -- model -------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module, move: bool = True) -> nn.Module:
        """``module`` on its device (if ``move``), wrapped where forward and backward must know of other processes."""
        return module.to(self.device) if move else module

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step``, a bound method of ``module`` that runs forward, made aware of other processes."""
        return step

    def copy_weights(self, module: nn.Module) -> None:
        """Rank 0's weights on every rank, for a module that :meth:`wrap_step` does not watch."""

    def average_gradients(self, module: nn.Module) -> None:
        """Average over ranks the gradients that such a module's backward left."""

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Context in which backward does not reduce gradients (all but the last batch of a window)."""
        return nullcontext()

    def move(self, batch: Any) -> Any:
        return move_batch(batch, self.device)

    # -- collectives: with one process each is the identity --------------------------------------------------------

    def barrier(self, name: str = "") -> None:
        """Wait for every process."""

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """``value`` of rank ``src``, any picklable object, on every rank."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order."""
        return [value]

    def all_reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """``tensor`` combined over ranks by mean, sum, max or min (a new tensor)."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's ``tensor``, stacked along a new first dimension."""
        return tensor.unsqueeze(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``all`` (or any) ranks decided so."""
        return decision


class SingleDeviceStrategy(Strategy):
    """Everything in this process."""
