# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.advanced import AdvancedProfiler as AdvancedProfiler

__all__ = [
    "AdvancedProfiler",
]
