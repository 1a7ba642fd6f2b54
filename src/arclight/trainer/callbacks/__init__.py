"""Callbacks that come with the trainer, one class per file. A user's own is a subclass of ``Callback``."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback, Checkpoint
    from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder
    from arclight.trainer.callbacks.device_stats_monitor import DeviceStatsMonitor
    from arclight.trainer.callbacks.diloco import DiLoCo
    from arclight.trainer.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from arclight.trainer.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from arclight.trainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from arclight.trainer.callbacks.lambda_callback import LambdaCallback
    from arclight.trainer.callbacks.loss_guard import LossGuard
    from arclight.trainer.callbacks.lr_finder import LearningRateFinder
    from arclight.trainer.callbacks.lr_monitor import LearningRateMonitor
    from arclight.trainer.callbacks.micro_batching import MicroBatching
    from arclight.trainer.callbacks.model_checkpoint import ModelCheckpoint
    from arclight.trainer.callbacks.model_summary import ModelSummary, RichModelSummary
    from arclight.trainer.callbacks.monitored import MissingMetricError
    from arclight.trainer.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from arclight.trainer.callbacks.pipeline_timeline import PipelineTimeline
    from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter
    from arclight.trainer.callbacks.progress_bar import ProgressBar
    from arclight.trainer.callbacks.progress_columns import RichProgressBarTheme
    from arclight.trainer.callbacks.pruning import ModelPruning
    from arclight.trainer.callbacks.rich_progress_bar import RichProgressBar
    from arclight.trainer.callbacks.run_report import RunReport
    from arclight.trainer.callbacks.spike import SpikeDetection
    from arclight.trainer.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from arclight.trainer.callbacks.throughput_monitor import ThroughputMonitor
    from arclight.trainer.callbacks.timer import Timer
    from arclight.trainer.callbacks.tqdm_progress import TQDMProgressBar
    from arclight.trainer.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

_FILES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "DeviceStatsMonitor": "device_stats_monitor",
    "DiLoCo": "diloco",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "EMAWeightAveraging": "weight_averaging",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "LossGuard": "loss_guard",
    "MicroBatching": "micro_batching",
    "MissingMetricError": "monitored",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PipelineTimeline": "pipeline_timeline",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "rich_progress_bar",
    "RichProgressBarTheme": "progress_columns",
    "RunReport": "run_report",
    "SpikeDetection": "spike",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "TQDMProgressBar": "tqdm_progress",
    "WeightAveraging": "weight_averaging",
}

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {name: f"{__name__}.{file}" for name, file in _FILES.items()}
    | dict.fromkeys(("Callback", "Checkpoint"), "arclight.trainer.callback"),
)
