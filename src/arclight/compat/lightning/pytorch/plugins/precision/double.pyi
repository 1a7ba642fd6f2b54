# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.true_precision import DoublePrecision as DoublePrecision

__all__ = [
    "DoublePrecision",
]
