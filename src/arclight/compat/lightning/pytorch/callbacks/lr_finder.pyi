# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.lr_finder import LearningRateFinder as LearningRateFinder

__all__ = [
    "LearningRateFinder",
]
