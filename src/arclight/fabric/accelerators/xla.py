"""TPUs and other devices that are programmed through XLA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from arclight.fabric.accelerators.base import Accelerator, check_kind
from arclight.fabric.accelerators.device_ids import check_devices
from arclight.fabric.errors import MisconfigurationError


class XLAAccelerator(Accelerator):
    """A TPU through torch_xla, one device for each process, run eagerly: each operation is compiled by itself.

    Programs of several devices are started by torch_xla's own launcher. Raises ModuleNotFoundError without torch_xla.
    """

    def __init__(self) -> None:
        if find_spec("torch_xla") is None:
            raise ModuleNotFoundError(
                "XLAAccelerator needs torch_xla in the version of your torch: pip install 'torch_xla[tpu]'; "
                'without a TPU use accelerator="auto"'
            )

    @staticmethod
    def name() -> str:
        return "tpu"

    @staticmethod
    def is_available() -> bool:
        if find_spec("torch_xla") is None:
            return False
        from torch_xla import runtime

        return bool(runtime.device_type() == "TPU")

    @staticmethod
    def auto_device_count() -> int:
        from torch_xla import runtime

        return int(runtime.global_runtime_device_count())

    @staticmethod
    def parse_devices(devices: Any) -> int | list[int]:
        check_devices(devices)
        if isinstance(devices, str) and devices.strip().lstrip("-").isdigit():
            devices = int(devices)
        if isinstance(devices, int) and devices > 0:
            return devices
        if isinstance(devices, (list, tuple)) and len(devices) == 1:
            return list(devices)
        raise MisconfigurationError(f"devices={devices!r}: a TPU takes a count, or a list of one device number")

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        numbers = devices if isinstance(devices, list) else range(devices)
        return [torch.device("xla", number) for number in numbers]

    def setup_device(self, device: torch.device) -> None:
        check_kind(device, "xla")
        from torch_xla.experimental import eager_mode

        eager_mode(True)

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        """Memory of the device in bytes: used, highest, and all of it."""
        from torch_xla.core import xla_model

        memory = xla_model.get_memory_info(device)
        return {f"xla_{name}": value for name, value in memory.items()}

    def teardown(self) -> None:
        pass
