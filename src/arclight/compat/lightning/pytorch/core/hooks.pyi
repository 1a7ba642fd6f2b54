# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.data_hooks import DataHooks as DataHooks

__all__ = [
    "DataHooks",
]
