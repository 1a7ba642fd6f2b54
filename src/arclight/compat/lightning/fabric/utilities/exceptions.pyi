# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.errors import MisconfigurationError as MisconfigurationException

__all__ = [
    "MisconfigurationException",
]
