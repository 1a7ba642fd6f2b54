# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.fabric_loggers import FabricTensorBoardLogger as TensorBoardLogger
from arclight.compat.lightning.utilities import _TENSORBOARDX_AVAILABLE as _TENSORBOARDX_AVAILABLE
from arclight.compat.lightning.utilities import _TENSORBOARD_AVAILABLE as _TENSORBOARD_AVAILABLE

__all__ = [
    "TensorBoardLogger",
]
