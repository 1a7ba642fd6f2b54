# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder

__all__ = [
    "LearningRateFinder",
]
