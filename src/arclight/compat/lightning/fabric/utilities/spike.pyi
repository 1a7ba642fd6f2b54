# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.loss_guard import FabricSpikeDetection as SpikeDetection
from arclight.trainer.callbacks.loss_guard import TrainingSpikeException as TrainingSpikeException

__all__ = [
    "SpikeDetection",
    "TrainingSpikeException",
]
