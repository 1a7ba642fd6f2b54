# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.base import Precision as Precision

__all__ = [
    "Precision",
]
