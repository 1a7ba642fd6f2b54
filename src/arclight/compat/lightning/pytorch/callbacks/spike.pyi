# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.loss_guard import SpikeDetection as SpikeDetection

__all__ = [
    "SpikeDetection",
]
