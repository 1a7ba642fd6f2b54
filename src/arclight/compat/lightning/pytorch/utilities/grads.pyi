# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import grad_norm as grad_norm

__all__ = [
    "grad_norm",
]
