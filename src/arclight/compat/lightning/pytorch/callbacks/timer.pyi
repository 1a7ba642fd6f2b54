# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.timer import Timer as Timer

__all__ = [
    "Timer",
]
