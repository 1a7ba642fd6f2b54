"""Define Lightning Fabric's collectives, each with a process group and its operations.

User code imports them as ``fabric.plugins.collectives``, by the table in `names`; nothing in Arclight calls them: our loops use the collectives
of a strategy. Names and arguments are Lightning's and stay.
"""

from __future__ import annotations

import datetime
import os
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

Self = TypeVar("Self", bound="Collective")


class Collective(ABC):
    """Collective operations of one process group; tensors are changed in place and returned.

    ``setup()`` joins all processes, ``create_group(ranks=...)`` makes a group of some of them, ``teardown()`` leaves it.
    """

    def __init__(self) -> None:
        self._group: Any = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process in the group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Processes in the group."""

    @property
    def group(self) -> Any:
        """Return the group that this object owns. Raises RuntimeError without one."""
        if self._group is None:
            raise RuntimeError(f"`{type(self).__name__}` does not own a group: call create_group() first")
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor: ...
    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor: ...
    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor: ...
    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]: ...
    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]: ...
    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor: ...
    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor: ...
    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]: ...
    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None: ...
    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor: ...
    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None: ...

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Return True if such groups exist on this platform."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Return True if the default process group is initialised."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Initialise the default process group."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """Return a new group of some processes."""

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None:
        """Destroy ``group``."""

    def setup(self: Self, **kwargs: Any) -> Self:
        """Initialise the default process group, unless it is there."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self: Self, **kwargs: Any) -> Self:
        """Create this object's group; every process must call this.

        Raises RuntimeError if it has one.
        """
        if self._group is not None:
            raise RuntimeError(f"`{type(self).__name__}` already owns a group: teardown() comes first")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self: Self) -> Self:
        """Destroy the group. Raises RuntimeError if there is none."""
        if self._group is None:
            raise RuntimeError(f"`{type(self).__name__}` does not own a group to leave")
        self.destroy_group(self._group)
        self._group = None
        return self


class TorchCollective(Collective):
    """Collectives of torch.distributed, on a group of their own or all processes.

    ``op`` is a ``ReduceOp`` or its name.
    """

    manages_default_group = False
    """Whether one of these objects joined all processes, and so is to leave that group with the last of its own."""

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("Torch distributed is not available in this build of torch")
        super().__init__()

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = dist.GroupMember.WORLD
        return super().group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    # -- operations ------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        dist.all_reduce(tensor, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        dist.reduce(tensor, dst, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        dist.gather(tensor, gather_list, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        dist.scatter(tensor, scatter_list, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        dist.reduce_scatter(output, input_list, op=self._convert_to_native_op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        dist.gather_object(obj, object_gather_list, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        if self.group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    # -- groups ----------------------------------------------------------------------------------------------------

    def setup(
        self, main_address: str | None = None, main_port: str | int | None = None, **kwargs: Any
    ) -> TorchCollective:
        """Initialise the default process group, unless it is there.

        ``MASTER_ADDR`` and ``MASTER_PORT`` go before the arguments.
        """
        if self.is_initialized():
            return self
        wanted = {"MASTER_ADDR": main_address, "MASTER_PORT": main_port}
        added = {key: str(value) for key, value in wanted.items() if value is not None and key not in os.environ}
        os.environ.update(added)
        try:
            super().setup(**kwargs)
        finally:
            for key in added:
                os.environ.pop(key, None)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self) -> TorchCollective:
        member = self.group != dist.GroupMember.NON_GROUP_MEMBER
        super().teardown()
        world = dist.GroupMember.WORLD
        if TorchCollective.manages_default_group:
            if world is None:
                TorchCollective.manages_default_group = False
            elif member and len(distributed_c10d._pg_map) == 1:  # only the group of all is left
                self.destroy_group(world)
                TorchCollective.manages_default_group = False
        return self

    @classmethod
    def is_available(cls) -> bool:
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        dist.init_process_group(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return dist.new_group(**kwargs)

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        if group in distributed_c10d._pg_map:  # others hold a mere placeholder
            dist.destroy_process_group(group)

    @classmethod
    def _convert_to_native_op(cls, op: Any) -> Any:
        """Return torch's reduction for a name or reduction.

        Raises ValueError for anything else.
        """
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return op
        if not isinstance(op, str):
            raise ValueError(f"Unsupported op {op!r} of type {type(op).__name__}: give a ReduceOp or its name")
        found = getattr(dist.ReduceOp, op.upper(), None)
        if found is None:
            raise ValueError(f"op {op.upper()!r} is not a member of `ReduceOp`")
        return found


class SingleDeviceCollective(Collective):
    """Collectives of one process, which copy what is sent to what is received."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, dst: int = 0, op: Any = "sum") -> Tensor:
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        return _filled(tensor_list, [tensor])

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        return _filled(gather_list, [tensor])

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        return _filled([tensor], scatter_list)[0]

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        return _filled([output], input_list)[0]

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        return _filled(output_tensor_list, input_tensor_list)

    def send(self, tensor: Tensor, dst: int = 0, tag: int = 0) -> None:
        raise RuntimeError("there is only one process, so none to send to or receive from: start several")

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        raise RuntimeError("there is one process: nobody to receive from")

    def barrier(self, device_ids: list[int] | None = None) -> None:
        pass

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        pass

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return object()

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        pass


def _filled(targets: list[Tensor], sources: list[Tensor]) -> list[Tensor]:
    """Copy what one process sends into what it receives; without targets, return it.

    Raises ValueError for another number than one.
    """
    if len(sources) != 1 or len(targets) > 1:
        raise ValueError(
            f"one process sends one tensor to itself: {len(sources)} were given to send, {len(targets)} to receive into"
        )
    for target, source in zip(targets, sources, strict=False):
        target.copy_(source)
    return targets or list(sources)
