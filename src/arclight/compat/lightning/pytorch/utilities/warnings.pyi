# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.warnings import PossibleUserWarning as PossibleUserWarning

__all__ = [
    "PossibleUserWarning",
]
