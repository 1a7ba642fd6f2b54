# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.low_bit import TransformerEnginePrecision as TransformerEnginePrecision

__all__ = [
    "TransformerEnginePrecision",
]
