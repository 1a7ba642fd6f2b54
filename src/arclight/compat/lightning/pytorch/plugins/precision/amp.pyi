# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.mixed import MixedPrecision as MixedPrecision

__all__ = [
    "MixedPrecision",
]
