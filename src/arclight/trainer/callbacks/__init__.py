"""Callbacks that come with the trainer, one class per file. A user's own is a subclass of ``Callback``."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback as Callback
    from arclight.trainer.callback import Checkpoint as Checkpoint
    from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from arclight.trainer.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from arclight.trainer.callbacks.diloco import DiLoCo as DiLoCo
    from arclight.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from arclight.trainer.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from arclight.trainer.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from arclight.trainer.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from arclight.trainer.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from arclight.trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from arclight.trainer.callbacks.loss_guard import LossGuard as LossGuard
    from arclight.trainer.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from arclight.trainer.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from arclight.trainer.callbacks.micro_batching import MicroBatching as MicroBatching
    from arclight.trainer.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from arclight.trainer.callbacks.model_summary import ModelSummary as ModelSummary
    from arclight.trainer.callbacks.model_summary import RichModelSummary as RichModelSummary
    from arclight.trainer.callbacks.monitored import MissingMetricError as MissingMetricError
    from arclight.trainer.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from arclight.trainer.callbacks.pipeline_timeline import PipelineTimeline as PipelineTimeline
    from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from arclight.trainer.callbacks.progress_bar import ProgressBar as ProgressBar
    from arclight.trainer.callbacks.progress_columns import RichProgressBarTheme as RichProgressBarTheme
    from arclight.trainer.callbacks.pruning import ModelPruning as ModelPruning
    from arclight.trainer.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
    from arclight.trainer.callbacks.run_report import RunReport as RunReport
    from arclight.trainer.callbacks.spike import SpikeDetection as SpikeDetection
    from arclight.trainer.callbacks.stochastic_weight_averaging import (
        StochasticWeightAveraging as StochasticWeightAveraging,
    )
    from arclight.trainer.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from arclight.trainer.callbacks.timer import Timer as Timer
    from arclight.trainer.callbacks.tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from arclight.trainer.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from arclight.trainer.callbacks.weight_averaging import WeightAveraging as WeightAveraging

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
