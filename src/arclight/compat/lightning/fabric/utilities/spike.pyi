# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.spike_detection import FabricSpikeDetection as SpikeDetection
from arclight.trainer.callbacks.spike_detection import TrainingSpikeException as TrainingSpikeException

__all__ = [
    "SpikeDetection",
    "TrainingSpikeException",
]
