"""Provide the trainer's callbacks. A user's own is a subclass of ``Callback``.

In: hook calls; out: checkpoints, stops, changed weights, displays. ``checkpoint`` saves, ``progress`` displays, ``monitoring`` observes,
``weights`` changes weights; of the other files ``settings`` holds the tables of recipes, ``monitored`` the checks of callbacks that watch a
logged value, and each of the rest callbacks of one purpose. Public ones are listed here; names are Lightning's where it has them.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback as Callback
    from arclight.trainer.callback import Checkpoint as Checkpoint
    from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from arclight.trainer.callbacks.checkpoint.on_exception_checkpoint import (
        OnExceptionCheckpoint as OnExceptionCheckpoint,
    )
    from arclight.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from arclight.trainer.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from arclight.trainer.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from arclight.trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from arclight.trainer.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
    from arclight.trainer.callbacks.loss_guard import LossGuard as LossGuard
    from arclight.trainer.callbacks.loss_guard import SpikeDetection as SpikeDetection
    from arclight.trainer.callbacks.micro_batching import MicroBatching as MicroBatching
    from arclight.trainer.callbacks.monitored import MissingMetricError as MissingMetricError
    from arclight.trainer.callbacks.monitoring.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from arclight.trainer.callbacks.monitoring.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from arclight.trainer.callbacks.monitoring.model_summary import ModelSummary as ModelSummary
    from arclight.trainer.callbacks.monitoring.model_summary import RichModelSummary as RichModelSummary
    from arclight.trainer.callbacks.monitoring.pipeline_timeline import PipelineTimeline as PipelineTimeline
    from arclight.trainer.callbacks.monitoring.run_report import RunReport as RunReport
    from arclight.trainer.callbacks.monitoring.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from arclight.trainer.callbacks.progress.progress_bar import ProgressBar as ProgressBar
    from arclight.trainer.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
    from arclight.trainer.callbacks.progress.rich_progress import RichProgressBarTheme as RichProgressBarTheme
    from arclight.trainer.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from arclight.trainer.callbacks.timer import Timer as Timer
    from arclight.trainer.callbacks.weights.diloco import DiLoCo as DiLoCo
    from arclight.trainer.callbacks.weights.finetuning import BackboneFinetuning as BackboneFinetuning
    from arclight.trainer.callbacks.weights.finetuning import BaseFinetuning as BaseFinetuning
    from arclight.trainer.callbacks.weights.pruning import ModelPruning as ModelPruning
    from arclight.trainer.callbacks.weights.stochastic_weight_averaging import (
        StochasticWeightAveraging as StochasticWeightAveraging,
    )
    from arclight.trainer.callbacks.weights.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from arclight.trainer.callbacks.weights.weight_averaging import WeightAveraging as WeightAveraging

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "BackboneFinetuning": "arclight.trainer.callbacks.weights.finetuning",
        "BaseFinetuning": "arclight.trainer.callbacks.weights.finetuning",
        "BasePredictionWriter": "arclight.trainer.callbacks.prediction_writer",
        "BatchSizeFinder": "arclight.trainer.callbacks.batch_size_finder",
        "DeviceStatsMonitor": "arclight.trainer.callbacks.monitoring.device_stats_monitor",
        "DiLoCo": "arclight.trainer.callbacks.weights.diloco",
        "EMAWeightAveraging": "arclight.trainer.callbacks.weights.weight_averaging",
        "EarlyStopping": "arclight.trainer.callbacks.early_stopping",
        "EarlyStoppingReason": "arclight.trainer.callbacks.early_stopping",
        "GradientAccumulationScheduler": "arclight.trainer.callbacks.gradient_accumulation_scheduler",
        "LambdaCallback": "arclight.trainer.callbacks.lambda_callback",
        "LearningRateFinder": "arclight.trainer.callbacks.learning_rate_finder",
        "LearningRateMonitor": "arclight.trainer.callbacks.monitoring.lr_monitor",
        "LossGuard": "arclight.trainer.callbacks.loss_guard",
        "MicroBatching": "arclight.trainer.callbacks.micro_batching",
        "MissingMetricError": "arclight.trainer.callbacks.monitored",
        "ModelCheckpoint": "arclight.trainer.callbacks.checkpoint.model_checkpoint",
        "ModelPruning": "arclight.trainer.callbacks.weights.pruning",
        "ModelSummary": "arclight.trainer.callbacks.monitoring.model_summary",
        "OnExceptionCheckpoint": "arclight.trainer.callbacks.checkpoint.on_exception_checkpoint",
        "PipelineTimeline": "arclight.trainer.callbacks.monitoring.pipeline_timeline",
        "ProgressBar": "arclight.trainer.callbacks.progress.progress_bar",
        "RichModelSummary": "arclight.trainer.callbacks.monitoring.model_summary",
        "RichProgressBar": "arclight.trainer.callbacks.progress.rich_progress",
        "RichProgressBarTheme": "arclight.trainer.callbacks.progress.rich_progress",
        "RunReport": "arclight.trainer.callbacks.monitoring.run_report",
        "SpikeDetection": "arclight.trainer.callbacks.loss_guard",
        "StochasticWeightAveraging": "arclight.trainer.callbacks.weights.stochastic_weight_averaging",
        "TQDMProgressBar": "arclight.trainer.callbacks.progress.tqdm_progress",
        "ThroughputMonitor": "arclight.trainer.callbacks.monitoring.throughput_monitor",
        "Timer": "arclight.trainer.callbacks.timer",
        "WeightAveraging": "arclight.trainer.callbacks.weights.weight_averaging",
        "Callback": "arclight.trainer.callback",
        "Checkpoint": "arclight.trainer.callback",
    },
)
