"""Callbacks that come with the trainer, one class per file. A user's own is a subclass of ``Callback``."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback, Checkpoint
    from arclight.trainer.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from arclight.trainer.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from arclight.trainer.callbacks.lambda_callback import LambdaCallback
    from arclight.trainer.callbacks.lr_monitor import LearningRateMonitor
    from arclight.trainer.callbacks.model_checkpoint import ModelCheckpoint
    from arclight.trainer.callbacks.model_summary import ModelSummary, RichModelSummary
    from arclight.trainer.callbacks.monitored import MissingMetricError
    from arclight.trainer.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter
    from arclight.trainer.callbacks.rich_progress_bar import RichProgressBar
    from arclight.trainer.callbacks.run_report import RunReport
    from arclight.trainer.callbacks.spike import SpikeDetection
    from arclight.trainer.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from arclight.trainer.callbacks.timer import Timer
    from arclight.trainer.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

_FILES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "EMAWeightAveraging": "weight_averaging",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "lr_monitor",
    "MissingMetricError": "monitored",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "RichModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "RichProgressBar": "rich_progress_bar",
    "RunReport": "run_report",
    "SpikeDetection": "spike",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {name: f"{__name__}.{file}" for name, file in _FILES.items()}
    | dict.fromkeys(("Callback", "Checkpoint"), "arclight.trainer.callback"),
)
