# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.modules import find_shared_parameters as find_shared_parameters
from arclight.fabric.modules import set_shared_parameters as set_shared_parameters

__all__ = [
    "find_shared_parameters",
    "set_shared_parameters",
]
