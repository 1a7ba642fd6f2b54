# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.tuner.tuning import Tuner as Tuner
from . import batch_size_scaling as batch_size_scaling
from . import lr_finder as lr_finder
from . import tuning as tuning

__all__ = [
    "Tuner",
]
