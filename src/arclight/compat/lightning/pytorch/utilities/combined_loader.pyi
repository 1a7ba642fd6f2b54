# Written by tests/compat/write_stubs.py from the table of names.
from arclight.data.combined import CombinedLoader as CombinedLoader

__all__ = [
    "CombinedLoader",
]
