# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.devices import CUDAAccelerator as CUDAAccelerator

__all__ = [
    "CUDAAccelerator",
]
