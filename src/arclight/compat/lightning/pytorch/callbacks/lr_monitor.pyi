# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor

__all__ = [
    "LearningRateMonitor",
]
