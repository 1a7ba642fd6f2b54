# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.fabric_loggers import FabricTensorBoardLogger as TensorBoardLogger
from arclight.compat.lightning.availability import _TENSORBOARDX_AVAILABLE as _TENSORBOARDX_AVAILABLE
from arclight.compat.lightning.availability import _TENSORBOARD_AVAILABLE as _TENSORBOARD_AVAILABLE

__all__ = [
    "TensorBoardLogger",
]
