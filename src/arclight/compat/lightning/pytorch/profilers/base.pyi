# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.profiler import PassThroughProfiler as PassThroughProfiler

__all__ = [
    "PassThroughProfiler",
]
