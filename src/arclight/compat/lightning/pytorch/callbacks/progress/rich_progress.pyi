# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
from arclight.trainer.callbacks.progress_columns import RichProgressBarTheme as RichProgressBarTheme

__all__ = [
    "RichProgressBar",
    "RichProgressBarTheme",
]
