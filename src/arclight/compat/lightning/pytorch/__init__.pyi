# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callback import Callback as Callback
from arclight.trainer.datamodule import DataModule as LightningDataModule
from arclight.trainer.module import Module as LightningModule
from arclight.compat.lightning.trainer import Trainer as Trainer
from arclight.compat.lightning.names import __version__ as __version__
from arclight.fabric.seeding import seed_everything as seed_everything
from . import accelerators as accelerators
from . import callbacks as callbacks
from . import cli as cli
from . import core as core
from . import demos as demos
from . import loggers as loggers
from . import overrides as overrides
from . import plugins as plugins
from . import profilers as profilers
from . import serve as serve
from . import strategies as strategies
from . import trainer as trainer
from . import tuner as tuner
from . import utilities as utilities

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "seed_everything",
]
