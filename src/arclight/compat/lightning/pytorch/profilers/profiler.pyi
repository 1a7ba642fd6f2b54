# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.profiler import Profiler as Profiler

__all__ = [
    "Profiler",
]
