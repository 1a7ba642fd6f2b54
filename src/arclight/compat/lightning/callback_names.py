"""The rows of the table of names that are callbacks; see :mod:`arclight.compat.lightning.names`."""

from __future__ import annotations


Rows = tuple[tuple[str, str, str], ...]


CALLBACKS: Rows = (
    ("pytorch.callbacks pytorch.callbacks.batch_size_finder", "arclight.trainer.callbacks.batch_size_finder", "BatchSizeFinder"),
    ("pytorch.callbacks pytorch.callbacks.device_stats_monitor", "arclight.trainer.callbacks.device_stats_monitor", "DeviceStatsMonitor"),
    ("pytorch.callbacks pytorch.callbacks.early_stopping", "arclight.trainer.callbacks.early_stopping", "EarlyStopping"),
    ("pytorch.callbacks pytorch.callbacks.finetuning", "arclight.trainer.callbacks.finetuning", "BackboneFinetuning BaseFinetuning"),
    ("pytorch.callbacks pytorch.callbacks.gradient_accumulation_scheduler", "arclight.trainer.callbacks.gradient_accumulation_scheduler", "GradientAccumulationScheduler"),
    ("pytorch.callbacks pytorch.callbacks.lr_finder", "arclight.trainer.callbacks.lr_finder", "LearningRateFinder"),
    ("pytorch.callbacks pytorch.callbacks.lr_monitor", "arclight.trainer.callbacks.lr_monitor", "LearningRateMonitor"),
    ("pytorch.callbacks pytorch.callbacks.model_checkpoint", "arclight.trainer.callbacks.model_checkpoint", "ModelCheckpoint"),
    ("pytorch.callbacks pytorch.callbacks.model_summary", "arclight.trainer.callbacks.model_summary", "ModelSummary"),
    ("pytorch.callbacks pytorch.callbacks.on_exception_checkpoint", "arclight.trainer.callbacks.on_exception_checkpoint", "OnExceptionCheckpoint"),
    ("pytorch.callbacks pytorch.callbacks.prediction_writer", "arclight.trainer.callbacks.prediction_writer", "BasePredictionWriter"),
    ("pytorch.callbacks pytorch.callbacks.pruning", "arclight.trainer.callbacks.pruning", "ModelPruning"),
    ("pytorch.callbacks pytorch.callbacks.spike", "arclight.trainer.callbacks.spike", "SpikeDetection"),
    ("pytorch.callbacks pytorch.callbacks.throughput_monitor", "arclight.trainer.callbacks.throughput_monitor", "ThroughputMonitor"),
    ("pytorch.callbacks pytorch.callbacks.timer", "arclight.trainer.callbacks.timer", "Timer"),
    ("pytorch.callbacks pytorch.callbacks.weight_averaging", "arclight.trainer.callbacks.weight_averaging", "EMAWeightAveraging WeightAveraging"),
    ("pytorch.callbacks pytorch.callbacks.checkpoint", "arclight.trainer.callback", "Checkpoint"),
    ("pytorch.callbacks.early_stopping", "arclight.trainer.callbacks.early_stopping", "EarlyStoppingReason"),
    ("pytorch.callbacks pytorch.callbacks.lambda_function", "arclight.trainer.callbacks.lambda_callback", "LambdaCallback"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.progress_bar",
        "arclight.trainer.callbacks.progress_bar",
        "ProgressBar",
    ),
    ("pytorch.callbacks.progress.progress_bar", "arclight.trainer.callbacks.progress_bar", "get_standard_metrics"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.tqdm_progress",
        "arclight.trainer.callbacks.tqdm_progress",
        "TQDMProgressBar",
    ),
    ("pytorch.callbacks.progress.tqdm_progress", "arclight.trainer.callbacks.tqdm_progress", "Tqdm convert_inf"),
    ("pytorch.callbacks.finetuning", "arclight.trainer.callbacks.finetuning", "multiplicative"),
    ("pytorch.callbacks.prediction_writer", "arclight.trainer.callbacks.prediction_writer", "WriteInterval"),
    ("pytorch.callbacks pytorch.callbacks.rich_model_summary", "arclight.trainer.callbacks.model_summary", "RichModelSummary"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.rich_progress",
        "arclight.trainer.callbacks.rich_progress_bar",
        "RichProgressBar",
    ),
    ("pytorch.callbacks.progress.rich_progress", "arclight.trainer.callbacks.progress_columns", "RichProgressBarTheme"),
    (
        "pytorch.callbacks pytorch.callbacks.stochastic_weight_avg",
        "arclight.trainer.callbacks.stochastic_weight_averaging",
        "StochasticWeightAveraging",
    ),
)
