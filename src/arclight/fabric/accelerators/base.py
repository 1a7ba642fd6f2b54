"""Define the interface of accelerators.

`devices` holds CPU, CUDA and MPS; users' own derive from `Accelerator` as well. ``fabric.selection`` asks it for devices, strategies set
them up, `DeviceStatsMonitor` reads their statistics. Names of methods are Lightning's and stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class Accelerator(ABC):
    """Base class of accelerators (kinds of device).

    A user's own is passed as ``accelerator=`` or registered under a name.
    """

    @staticmethod
    @abstractmethod
    def name() -> str:
        """Return the name that ``accelerator=`` knows it by."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return True if this machine has such a device."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return the number of devices that ``devices="auto"`` takes."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Convert ``devices=`` to the form that :meth:`get_parallel_devices` takes.

        Raises TypeError or MisconfigurationError for what is not a choice of devices of this machine.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> list[Any]:
        """Return the device of each local process."""

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Claim ``device`` for this process. Raises ValueError for a device of another kind."""

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return statistics of the load and memory of ``device``."""
        raise NotImplementedError(f"{type(self).__name__} has no statistics of its devices")

    @abstractmethod
    def teardown(self) -> None:
        """Release what this process no longer needs."""

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Register this class under its names in a registry."""
        accelerator_registry.register(cls.name(), cls, description=cls.__name__)


def check_kind(device: torch.device, kind: str) -> None:
    """Raise MisconfigurationError for a device of another kind."""
    from arclight.fabric.errors import MisconfigurationError

    if device.type != kind:
        raise MisconfigurationError(f"Device should be {kind.upper()}, got {device} instead")
