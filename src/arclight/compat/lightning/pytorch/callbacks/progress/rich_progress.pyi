# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
from arclight.trainer.callbacks.progress.rich_progress import RichProgressBarTheme as RichProgressBarTheme

__all__ = [
    "RichProgressBar",
    "RichProgressBarTheme",
]
