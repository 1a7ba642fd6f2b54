# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import CheckpointIO as CheckpointIO

__all__ = [
    "CheckpointIO",
]
