# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.devices import CUDAAccelerator as CUDAAccelerator
from arclight.fabric.accelerators.devices import find_usable_cuda_devices as find_usable_cuda_devices
from arclight.fabric.accelerators.devices import is_cuda_available as is_cuda_available
from arclight.fabric.accelerators.devices import num_cuda_devices as num_cuda_devices

__all__ = [
    "CUDAAccelerator",
    "find_usable_cuda_devices",
    "is_cuda_available",
    "num_cuda_devices",
]
