# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.csv_logger import CSVLogger as CSVLogger
from arclight.trainer.loggers.comet_logger import CometLogger as CometLogger
from arclight.trainer.loggers.logger import Logger as Logger
from arclight.trainer.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
from arclight.trainer.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
from arclight.trainer.loggers.wandb_logger import WandbLogger as WandbLogger
from . import comet as comet
from . import csv_logs as csv_logs
from . import litlogger as litlogger
from . import logger as logger
from . import mlflow as mlflow
from . import neptune as neptune
from . import tensorboard as tensorboard
from . import utilities as utilities
from . import wandb as wandb
from arclight._lazy import Refused as _Refused

__all__ = [
    "CSVLogger",
    "CometLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
class LitLogger(_Refused): ...
class NeptuneLogger(_Refused): ...
