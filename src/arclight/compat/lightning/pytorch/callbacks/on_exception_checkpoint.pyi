# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.checkpoint.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint

__all__ = [
    "OnExceptionCheckpoint",
]
