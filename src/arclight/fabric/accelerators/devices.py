"""Parse ``devices=``, and define the CPU, CUDA (or ROCm) and MPS accelerators.

`accelerator_registry` and ``fabric.selection`` resolve ``accelerator=`` and ``devices=`` by these; `DeviceStatsMonitor` logs the names of
`get_cpu_stats`. Forms of ``devices``, class names and logged names are Lightning's and stay.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from arclight.fabric.accelerators.base import Accelerator, check_kind
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.memory import keep_freed_memory
from arclight.fabric.rank_zero import rank_zero_info


def check_devices(devices: Any) -> None:
    """Raise TypeError for what is neither a number, nor text, nor a sequence of numbers."""
    wanted = "Device IDs (GPU/TPU) must be an int, a string, a sequence of ints, but you passed"
    if isinstance(devices, (list, tuple)):
        other = next((type(item).__name__ for item in devices if type(item) is not int), None)
        if other is not None:
            raise TypeError(f"{wanted} a sequence of {other}")
    elif type(devices) not in (int, str):
        raise TypeError(f"{wanted} {devices!r}")


def choose_devices(devices: Any, available: list[int]) -> list[int] | None:
    """Return the indices (among ``available``) of the devices that a user requests.

    None for none. ``3`` and ``"3"`` are the first three, ``-1`` and ``"-1"`` all, ``[1, 3]``, ``"1, 3"`` and ``"1,"`` those numbers. Raises
    TypeError for another type, MisconfigurationError for a device that is not there or named twice.
    """
    check_devices(devices)
    if isinstance(devices, str):
        text = devices.strip()
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise MisconfigurationError(f"devices={devices!r} is neither a number nor numbers between commas") from None
        devices = numbers if "," in text else numbers[0] if numbers else 0
    if not devices:
        return None
    if isinstance(devices, int):
        if devices < -1:
            raise MisconfigurationError(f"devices={devices}: give a count, or -1 for all")
        if devices == -1 and not available:
            raise MisconfigurationError("GPUs requested but none are available.")
        devices = available if devices == -1 else range(devices)
    chosen = list(devices)
    if len(set(chosen)) != len(chosen):
        raise MisconfigurationError(f"Device ID's (GPU) must be unique, got {chosen}")
    if _one_for_each_process(chosen, available):
        return chosen
    if not set(chosen) <= set(available):
        raise MisconfigurationError(f"You requested gpu: {chosen}\n But your machine only has: {available}")
    return chosen


def _one_for_each_process(chosen: list[int], available: list[int]) -> bool:
    """Return True if torchrun shows each process one device, the others being its siblings'."""
    import torch

    several_processes = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    return several_processes and len(chosen) != 1 and len(available) == 1


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
        keep_freed_memory()

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the percentages of processor, memory and swap space in use. Needs psutil."""
        return get_cpu_stats()

    def teardown(self) -> None:
        pass


def get_cpu_stats() -> dict[str, float]:
    """Return `host_load` under the names that are logged."""
    return dict(zip((_CPU_PERCENT, _CPU_VM_PERCENT, _CPU_SWAP_PERCENT), host_load().values(), strict=True))


def host_load() -> dict[str, float]:
    """Return the percentages of processor, memory and swap space in use. Needs psutil.

    The keys are ``percent``, ``vm_percent`` and ``swap_percent``.
    """
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Statistics of the processor need `psutil`: pip install psutil") from error
    return {
        "percent": psutil.cpu_percent(),
        "vm_percent": psutil.virtual_memory().percent,
        "swap_percent": psutil.swap_memory().percent,
    }


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
        _suggest_tensor_cores(device)
        torch.cuda.set_device(device)

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the allocator's own statistics, ``torch.cuda.memory_stats``."""
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
    """Return the indices of CUDA devices on which this process can make a tensor.

    num_devices: how many, -1 for all that can be used. On machines whose devices serve one process each (exclusive mode), other processes
    may hold some of them. Raises ValueError if there are too few, RuntimeError if too many are taken.
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
def _suggest_tensor_cores(device: torch.device) -> None:
    """Suggest Tensor Cores for float32 matrix products once, if the user has not chosen."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] < 8:
        return
    if torch.get_float32_matmul_precision() == "highest":
        rank_zero_info(
            f"This CUDA device ({torch.cuda.get_device_name(device)!r}) has Tensor Cores, which float32 matrix products do not use "
            "by default; torch.set_float32_matmul_precision('high') makes them several times faster, with fewer digits"
        )


class MPSAccelerator(Accelerator):
    """Apple's GPU (one) through Metal."""

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
        """Return the host's load and the bytes that Metal has allocated. Needs psutil."""
        load = {f"M1_{name}": value for name, value in host_load().items()}
        return load | {"mps_allocated_bytes": torch.mps.current_allocated_memory()}

    def teardown(self) -> None:
        torch.mps.empty_cache()
