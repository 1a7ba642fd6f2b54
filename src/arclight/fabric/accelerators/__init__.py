"""Define accelerators: one interface for all kinds of device.

In: ``accelerator=`` and ``devices=``; out: an Accelerator, for ``fabric.selection``. Open ``base`` first, the interface; ``devices`` are
CPU, CUDA and MPS, ``accelerator_registry`` resolves names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.accelerators.accelerator_registry import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY
    from arclight.fabric.accelerators.accelerator_registry import AcceleratorRegistry as AcceleratorRegistry
    from arclight.fabric.accelerators.accelerator_registry import resolve_accelerator as resolve_accelerator
    from arclight.fabric.accelerators.base import Accelerator as Accelerator
    from arclight.fabric.accelerators.devices import CPUAccelerator as CPUAccelerator
    from arclight.fabric.accelerators.devices import CUDAAccelerator as CUDAAccelerator
    from arclight.fabric.accelerators.devices import MPSAccelerator as MPSAccelerator
    from arclight.fabric.accelerators.devices import find_usable_cuda_devices as find_usable_cuda_devices

NO_XLA = "XLA devices are not supported; use accelerator='cuda', 'mps' or 'cpu'"
"""Message for a choice of XLA devices, such as TPUs."""

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "ACCELERATOR_REGISTRY": "arclight.fabric.accelerators.accelerator_registry",
        "Accelerator": "arclight.fabric.accelerators.base",
        "AcceleratorRegistry": "arclight.fabric.accelerators.accelerator_registry",
        "CPUAccelerator": "arclight.fabric.accelerators.devices",
        "CUDAAccelerator": "arclight.fabric.accelerators.devices",
        "MPSAccelerator": "arclight.fabric.accelerators.devices",
        "find_usable_cuda_devices": "arclight.fabric.accelerators.devices",
        "resolve_accelerator": "arclight.fabric.accelerators.accelerator_registry",
    },
    refused={"XLAAccelerator": NO_XLA},
)
