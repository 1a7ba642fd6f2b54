# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.one_type import HalfPrecision as HalfPrecision

__all__ = [
    "HalfPrecision",
]
