# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint as ModelCheckpoint

__all__ = [
    "ModelCheckpoint",
]
