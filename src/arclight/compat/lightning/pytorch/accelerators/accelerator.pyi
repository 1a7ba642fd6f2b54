# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.base import Accelerator as Accelerator

__all__ = [
    "Accelerator",
]
