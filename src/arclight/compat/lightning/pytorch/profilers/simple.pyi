# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.simple import SimpleProfiler as SimpleProfiler

__all__ = [
    "SimpleProfiler",
]
