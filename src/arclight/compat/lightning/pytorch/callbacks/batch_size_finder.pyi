# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder

__all__ = [
    "BatchSizeFinder",
]
