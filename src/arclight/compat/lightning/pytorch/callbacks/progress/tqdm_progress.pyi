# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
from arclight.trainer.callbacks.progress.tqdm_progress import Tqdm as Tqdm
from arclight.trainer.callbacks.progress.tqdm_progress import convert_inf as convert_inf

__all__ = [
    "TQDMProgressBar",
    "Tqdm",
    "convert_inf",
]
