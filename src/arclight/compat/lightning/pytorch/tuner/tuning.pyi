# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.tuner.tuning import Tuner as Tuner

__all__ = [
    "Tuner",
]
