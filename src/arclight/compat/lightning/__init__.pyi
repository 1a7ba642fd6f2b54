# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callback import Callback as Callback
from arclight.trainer.fabric.fabric import Fabric as Fabric
from arclight.trainer.datamodule import DataModule as LightningDataModule
from arclight.trainer.module import Module as LightningModule
from arclight.compat.lightning.trainer import Trainer as Trainer
from arclight.compat.lightning.names import __version__ as __version__
from arclight.fabric.seeding import seed_everything as seed_everything
from . import fabric as fabric
from . import pytorch as pytorch

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "seed_everything",
]
