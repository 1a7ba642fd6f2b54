# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.low_bit import BitsandbytesPrecision as BitsandbytesPrecision

__all__ = [
    "BitsandbytesPrecision",
]
