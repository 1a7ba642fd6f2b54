# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import is_overridden as is_overridden

__all__ = [
    "is_overridden",
]
