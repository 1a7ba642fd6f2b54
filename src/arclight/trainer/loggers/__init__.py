"""Loggers: where metrics and hyper-parameters are written. A user's own is a subclass of ``Logger``."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.loggers.csv_logger import CSVLogger
    from arclight.trainer.loggers.logger import DummyLogger, Logger
    from arclight.trainer.loggers.tensorboard_logger import TensorBoardLogger

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "CSVLogger": "arclight.trainer.loggers.csv_logger",
        "DummyLogger": "arclight.trainer.loggers.logger",
        "Logger": "arclight.trainer.loggers.logger",
        "TensorBoardLogger": "arclight.trainer.loggers.tensorboard_logger",
    },
)
