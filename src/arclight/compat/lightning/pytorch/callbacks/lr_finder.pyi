# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.tuner.lr_finder import LearningRateFinder as LearningRateFinder

__all__ = [
    "LearningRateFinder",
]
