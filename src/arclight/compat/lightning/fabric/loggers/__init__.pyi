# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.fabric_loggers import FabricCSVLogger as CSVLogger
from arclight.trainer.loggers.logger import Logger as Logger
from arclight.compat.lightning.fabric_loggers import FabricTensorBoardLogger as TensorBoardLogger
from . import csv_logs as csv_logs
from . import logger as logger
from . import tensorboard as tensorboard

__all__ = [
    "CSVLogger",
    "Logger",
    "TensorBoardLogger",
]
