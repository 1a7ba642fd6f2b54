"""The rows of the table of names that are callbacks; see :mod:`arclight.compat.lightning.names`."""

from __future__ import annotations

_HOME = "arclight.trainer.callbacks"

Rows = tuple[tuple[str, str, str], ...]


def _rows(**names: str) -> Rows:
    """Rows of modules that have one name both here and there."""
    return tuple(
        (f"pytorch.callbacks pytorch.callbacks.{module}", f"{_HOME}.{module}", offered)
        for module, offered in names.items()
    )


_SAME = _rows(
    batch_size_finder="BatchSizeFinder",
    device_stats_monitor="DeviceStatsMonitor",
    early_stopping="EarlyStopping",
    finetuning="BackboneFinetuning BaseFinetuning",
    gradient_accumulation_scheduler="GradientAccumulationScheduler",
    lr_finder="LearningRateFinder",
    lr_monitor="LearningRateMonitor",
    model_checkpoint="ModelCheckpoint",
    model_summary="ModelSummary",
    on_exception_checkpoint="OnExceptionCheckpoint",
    prediction_writer="BasePredictionWriter",
    pruning="ModelPruning",
    spike="SpikeDetection",
    throughput_monitor="ThroughputMonitor",
    timer="Timer",
    weight_averaging="EMAWeightAveraging WeightAveraging",
)


CALLBACKS: Rows = (
    *_SAME,
    ("pytorch.callbacks pytorch.callbacks.checkpoint", "arclight.trainer.callback", "Checkpoint"),
    ("pytorch.callbacks.early_stopping", f"{_HOME}.early_stopping", "EarlyStoppingReason"),
    ("pytorch.callbacks pytorch.callbacks.lambda_function", f"{_HOME}.lambda_callback", "LambdaCallback"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.progress_bar",
        f"{_HOME}.progress_bar",
        "ProgressBar",
    ),
    ("pytorch.callbacks.progress.progress_bar", f"{_HOME}.progress_bar", "get_standard_metrics"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.tqdm_progress",
        f"{_HOME}.tqdm_progress",
        "TQDMProgressBar",
    ),
    ("pytorch.callbacks.progress.tqdm_progress", f"{_HOME}.tqdm_progress", "Tqdm convert_inf"),
    ("pytorch.callbacks.finetuning", f"{_HOME}.finetuning", "multiplicative"),
    ("pytorch.callbacks.prediction_writer", f"{_HOME}.prediction_writer", "WriteInterval"),
    ("pytorch.callbacks pytorch.callbacks.rich_model_summary", f"{_HOME}.model_summary", "RichModelSummary"),
    (
        "pytorch.callbacks pytorch.callbacks.progress pytorch.callbacks.progress.rich_progress",
        f"{_HOME}.rich_progress_bar",
        "RichProgressBar",
    ),
    ("pytorch.callbacks.progress.rich_progress", f"{_HOME}.progress_columns", "RichProgressBarTheme"),
    (
        "pytorch.callbacks pytorch.callbacks.stochastic_weight_avg",
        f"{_HOME}.stochastic_weight_averaging",
        "StochasticWeightAveraging",
    ),
)
