# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.base import Strategy as Strategy

__all__ = [
    "Strategy",
]
