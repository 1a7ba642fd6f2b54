# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.warning_kinds import PossibleUserWarning as PossibleUserWarning

__all__ = [
    "PossibleUserWarning",
]
