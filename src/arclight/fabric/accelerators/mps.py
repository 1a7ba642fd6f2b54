"""Apple's GPU."""

from __future__ import annotations

from typing import Any

import torch

from arclight.fabric.accelerators.base import Accelerator, check_kind
from arclight.fabric.accelerators.cpu import host_load
from arclight.fabric.accelerators.device_ids import choose_devices


class MPSAccelerator(Accelerator):
    """Apple's GPU, one of it, through Metal."""

    @staticmethod
    def name() -> str:
        return "mps"

    @staticmethod
    def is_available() -> bool:
        return torch.backends.mps.is_available()

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> list[int] | None:
        return choose_devices(devices, [0] if MPSAccelerator.is_available() else [])

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("mps", number) for number in MPSAccelerator.parse_devices(devices) or []]

    def setup_device(self, device: torch.device) -> None:
        check_kind(device, "mps")

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """The host's load (processor and GPU share the memory), and what Metal has allocated, in bytes. Needs psutil."""
        load = {f"M1_{name}": value for name, value in host_load().items()}
        return load | {"mps_allocated_bytes": torch.mps.current_allocated_memory()}

    def teardown(self) -> None:
        torch.mps.empty_cache()
