# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.parallel import ParallelStrategy as ParallelStrategy

__all__ = [
    "ParallelStrategy",
]
