# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.trainer import Trainer as Trainer

__all__ = [
    "Trainer",
]
