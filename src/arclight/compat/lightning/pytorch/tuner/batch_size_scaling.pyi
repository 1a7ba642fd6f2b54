# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.memory import is_out_of_memory as is_oom_error

__all__ = [
    "is_oom_error",
]
