# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO as AsyncCheckpointIO

__all__ = [
    "AsyncCheckpointIO",
]
