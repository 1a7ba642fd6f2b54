# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callback import Callback as Callback

__all__ = [
    "Callback",
]
