"""The host's processor."""

from __future__ import annotations

from typing import Any

import torch

from arclight.fabric.accelerators.base import Accelerator, check_kind

_CPU_PERCENT, _CPU_VM_PERCENT, _CPU_SWAP_PERCENT = "cpu_percent", "cpu_vm_percent", "cpu_swap_percent"


class CPUAccelerator(Accelerator):
    """The host's processor. ``devices`` counts processes, which share its cores."""

    @staticmethod
    def name() -> str:
        return "cpu"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        number: Any = int(devices) if isinstance(devices, str) and devices.strip().isdigit() else devices
        if type(number) is not int or number <= 0:
            raise TypeError(f"`devices` selected with `CPUAccelerator` should be an int > 0, got {devices!r}")
        return number

    @staticmethod
    def get_parallel_devices(devices: int | str) -> list[torch.device]:
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    def setup_device(self, device: torch.device) -> None:
        check_kind(device, "cpu")

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Percentages of the processor, the memory and the swap space in use. Needs psutil."""
        return get_cpu_stats()

    def teardown(self) -> None:
        pass


def get_cpu_stats() -> dict[str, float]:
    """`host_load` under the names that are logged."""
    return dict(zip((_CPU_PERCENT, _CPU_VM_PERCENT, _CPU_SWAP_PERCENT), host_load().values(), strict=True))


def host_load() -> dict[str, float]:
    """Percentages of the host's processor (``percent``), memory (``vm_percent``) and swap space in use. Needs psutil."""
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Statistics of the processor need `psutil`: pip install psutil") from error
    return {
        "percent": psutil.cpu_percent(),
        "vm_percent": psutil.virtual_memory().percent,
        "swap_percent": psutil.swap_memory().percent,
    }
