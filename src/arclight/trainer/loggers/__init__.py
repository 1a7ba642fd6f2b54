"""Log metrics and hyper-parameters. A user's own logger is a subclass of ``Logger``.

In: rows of numbers; out: files (``folder_logger``: CSV, TensorBoard) or a service's experiment (``hosted_logger``: MLflow, Weights & Biases,
Comet, ClearML). Open ``logger`` first, their base; ``params`` converts hyper-parameters, ``settings`` are the tables of recipes.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.loggers.clearml_logger import ClearMLLogger as ClearMLLogger
    from arclight.trainer.loggers.comet_logger import CometLogger as CometLogger
    from arclight.trainer.loggers.csv_logger import CSVLogger as CSVLogger
    from arclight.trainer.loggers.logger import DummyLogger as DummyLogger
    from arclight.trainer.loggers.logger import Logger as Logger
    from arclight.trainer.loggers.logger import rank_zero_experiment as rank_zero_experiment
    from arclight.trainer.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from arclight.trainer.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from arclight.trainer.loggers.wandb_logger import WandbLogger as WandbLogger

NO_NEPTUNE = "neptune.ai has closed its service; use MLFlowLogger, WandbLogger, CSVLogger or a Logger of your own"
"""Message for a use of the former ``NeptuneLogger``."""

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "CSVLogger": "arclight.trainer.loggers.csv_logger",
        "ClearMLLogger": "arclight.trainer.loggers.clearml_logger",
        "CometLogger": "arclight.trainer.loggers.comet_logger",
        "DummyLogger": "arclight.trainer.loggers.logger",
        "Logger": "arclight.trainer.loggers.logger",
        "MLFlowLogger": "arclight.trainer.loggers.mlflow_logger",
        "TensorBoardLogger": "arclight.trainer.loggers.tensorboard_logger",
        "WandbLogger": "arclight.trainer.loggers.wandb_logger",
        "rank_zero_experiment": "arclight.trainer.loggers.logger",
    },
    refused={"NeptuneLogger": NO_NEPTUNE},
)
