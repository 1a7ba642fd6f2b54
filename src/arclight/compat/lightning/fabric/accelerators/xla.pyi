# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.xla import XLAAccelerator as XLAAccelerator

__all__ = [
    "XLAAccelerator",
]
