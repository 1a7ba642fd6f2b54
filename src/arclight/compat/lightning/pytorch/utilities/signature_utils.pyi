# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import is_param_in_hook_signature as is_param_in_hook_signature

__all__ = [
    "is_param_in_hook_signature",
]
