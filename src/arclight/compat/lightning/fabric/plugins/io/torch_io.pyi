# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO

__all__ = [
    "TorchCheckpointIO",
]
