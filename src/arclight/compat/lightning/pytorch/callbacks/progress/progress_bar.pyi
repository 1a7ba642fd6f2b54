# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.progress.progress_bar import ProgressBar as ProgressBar
from arclight.trainer.callbacks.progress.progress_bar import get_standard_metrics as get_standard_metrics

__all__ = [
    "ProgressBar",
    "get_standard_metrics",
]
