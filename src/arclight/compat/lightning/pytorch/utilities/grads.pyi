# Written by tests/compat/write_stubs.py from the table of names.
from arclight.optim.gradients import grad_norm as grad_norm

__all__ = [
    "grad_norm",
]
