# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.tuner.lr_finder import LRFinder as __LRFinder

__all__ = [
]
_LRFinder = __LRFinder
