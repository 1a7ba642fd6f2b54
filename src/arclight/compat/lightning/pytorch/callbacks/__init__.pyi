# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.weights.finetuning import BackboneFinetuning as BackboneFinetuning
from arclight.trainer.callbacks.weights.finetuning import BaseFinetuning as BaseFinetuning
from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
from arclight.trainer.callback import Callback as Callback
from arclight.trainer.callback import Checkpoint as Checkpoint
from arclight.trainer.callbacks.monitoring.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
from arclight.trainer.callbacks.weights.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
from arclight.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
from arclight.trainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler as GradientAccumulationScheduler
from arclight.trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback
from arclight.trainer.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
from arclight.trainer.callbacks.monitoring.lr_monitor import LearningRateMonitor as LearningRateMonitor
from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from arclight.trainer.callbacks.weights.pruning import ModelPruning as ModelPruning
from arclight.trainer.callbacks.monitoring.model_summary import ModelSummary as ModelSummary
from arclight.trainer.callbacks.checkpoint.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from arclight.trainer.callbacks.progress.progress_bar import ProgressBar as ProgressBar
from arclight.trainer.callbacks.monitoring.model_summary import RichModelSummary as RichModelSummary
from arclight.trainer.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
from arclight.trainer.callbacks.loss_guard import SpikeDetection as SpikeDetection
from arclight.trainer.callbacks.weights.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
from arclight.trainer.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
from arclight.trainer.callbacks.monitoring.throughput_monitor import ThroughputMonitor as ThroughputMonitor
from arclight.trainer.callbacks.timer import Timer as Timer
from arclight.trainer.callbacks.weights.weight_averaging import WeightAveraging as WeightAveraging
from . import batch_size_finder as batch_size_finder
from . import callback as callback
from . import checkpoint as checkpoint
from . import device_stats_monitor as device_stats_monitor
from . import early_stopping as early_stopping
from . import finetuning as finetuning
from . import gradient_accumulation_scheduler as gradient_accumulation_scheduler
from . import lambda_function as lambda_function
from . import lr_finder as lr_finder
from . import lr_monitor as lr_monitor
from . import model_checkpoint as model_checkpoint
from . import model_summary as model_summary
from . import on_exception_checkpoint as on_exception_checkpoint
from . import prediction_writer as prediction_writer
from . import progress as progress
from . import pruning as pruning
from . import rich_model_summary as rich_model_summary
from . import spike as spike
from . import stochastic_weight_avg as stochastic_weight_avg
from . import throughput_monitor as throughput_monitor
from . import timer as timer
from . import weight_averaging as weight_averaging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
]
