# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision.base import DefaultDtype as __DtypeContextManager

__all__ = [
]
_DtypeContextManager = __DtypeContextManager
