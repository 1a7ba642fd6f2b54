# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.datamodule import DataModule as LightningDataModule

__all__ = [
    "LightningDataModule",
]
