# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callback import Checkpoint as Checkpoint

__all__ = [
    "Checkpoint",
]
