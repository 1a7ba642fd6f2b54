# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.spike import SpikeDetection as SpikeDetection
from arclight.trainer.spike import TrainingSpikeException as TrainingSpikeException

__all__ = [
    "SpikeDetection",
    "TrainingSpikeException",
]
