"""GPUs of NVIDIA, and of AMD through ROCm."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from arclight.fabric.accelerators.base import Accelerator, check_kind
from arclight.fabric.accelerators.device_ids import choose_devices
from arclight.fabric.rank_zero import rank_zero_info


class CUDAAccelerator(Accelerator):
    """NVIDIA (or ROCm) GPUs."""

    @staticmethod
    def name() -> str:
        return "cuda"

    @staticmethod
    def is_available() -> bool:
        return num_cuda_devices() > 0

    @staticmethod
    def auto_device_count() -> int:
        return num_cuda_devices()

    @staticmethod
    def parse_devices(devices: Any) -> list[int] | None:
        return choose_devices(devices, list(range(num_cuda_devices())))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", number) for number in devices]

    def setup_device(self, device: torch.device) -> None:
        check_kind(device, "cuda")
        _tell_of_tensor_cores(device)
        torch.cuda.set_device(device)

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """The allocator's own statistics, ``torch.cuda.memory_stats``."""
        return torch.cuda.memory_stats(device)

    def teardown(self) -> None:
        torch.cuda.empty_cache()


def num_cuda_devices() -> int:
    """Return the number of CUDA devices visible to this process."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Return True if this process can use CUDA."""
    return torch.cuda.is_available()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Numbers of ``num_devices`` CUDA devices (all: -1) on which this process can make a tensor.

    On machines whose devices are set to serve one process each, others may hold some of them.
    Raises ValueError where there are too few, RuntimeError where too many are taken.
    """
    if num_devices == 0:
        return []
    count = num_cuda_devices()
    if count == 0:
        raise ValueError(
            f"You requested to find {num_devices} devices but there are no visible CUDA devices on this machine"
        )
    if num_devices > count:
        raise ValueError(f"You requested to find {num_devices} devices but this machine only has {count} GPUs")
    usable: list[int] = []
    taken: list[int] = []
    for number in range(count):
        try:
            torch.tensor(0, device=torch.device("cuda", number))
        except RuntimeError:
            taken.append(number)
        else:
            usable.append(number)
        if len(usable) == num_devices:
            break
    if num_devices != -1 and len(usable) != num_devices:
        raise RuntimeError(
            f"You requested to find {num_devices} devices but only {len(usable)} can be used at the moment. "
            f"The devices {taken} are occupied by other processes"
        )
    return usable


@cache
def _tell_of_tensor_cores(device: torch.device) -> None:
    """Say once that float32 matrix products could be faster, where the user has not chosen either way."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] < 8:
        return
    if torch.get_float32_matmul_precision() == "highest":
        rank_zero_info(
            f"This CUDA device ({torch.cuda.get_device_name(device)!r}) has Tensor Cores, which float32 matrix products do not use "
            "by default; torch.set_float32_matmul_precision('high') makes them several times faster, with fewer digits"
        )
