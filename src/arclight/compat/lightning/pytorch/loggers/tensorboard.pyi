# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
from arclight.compat.lightning.utilities import _TENSORBOARD_AVAILABLE as _TENSORBOARD_AVAILABLE

__all__ = [
    "TensorBoardLogger",
]
