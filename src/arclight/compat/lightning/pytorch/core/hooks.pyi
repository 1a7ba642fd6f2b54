# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.datamodule import DataHooks as DataHooks

__all__ = [
    "DataHooks",
]
