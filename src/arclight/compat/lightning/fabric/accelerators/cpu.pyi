# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.cpu import CPUAccelerator as CPUAccelerator

__all__ = [
    "CPUAccelerator",
]
