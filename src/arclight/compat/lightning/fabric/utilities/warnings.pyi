# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.warnings import PossibleUserWarning as PossibleUserWarning
from arclight.fabric.warnings import disable_possible_user_warnings as disable_possible_user_warnings

__all__ = [
    "PossibleUserWarning",
    "disable_possible_user_warnings",
]
