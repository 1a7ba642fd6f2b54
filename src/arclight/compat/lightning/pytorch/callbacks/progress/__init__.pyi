# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.progress.progress_bar import ProgressBar as ProgressBar
from arclight.trainer.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
from arclight.trainer.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
from . import progress_bar as progress_bar
from . import rich_progress as rich_progress
from . import tqdm_progress as tqdm_progress

__all__ = [
    "ProgressBar",
    "RichProgressBar",
    "TQDMProgressBar",
]
