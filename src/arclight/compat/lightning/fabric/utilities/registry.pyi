# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.registry import load_external_callbacks as __load_external_callbacks

__all__ = [
]
_load_external_callbacks = __load_external_callbacks
