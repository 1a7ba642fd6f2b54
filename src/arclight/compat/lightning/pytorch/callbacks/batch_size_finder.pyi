# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.tuner.batch_size_scaling import BatchSizeFinder as BatchSizeFinder

__all__ = [
    "BatchSizeFinder",
]
