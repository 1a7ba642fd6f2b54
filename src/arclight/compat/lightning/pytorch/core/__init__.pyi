# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.datamodule import DataModule as LightningDataModule
from arclight.trainer.module import Module as LightningModule
from . import datamodule as datamodule
from . import hooks as hooks
from . import mixins as mixins
from . import module as module
from . import optimizer as optimizer
from . import saving as saving

__all__ = [
    "LightningDataModule",
    "LightningModule",
]
