# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.module import Module as LightningModule

__all__ = [
    "LightningModule",
]
