# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.monitoring.lr_monitor import LearningRateMonitor as LearningRateMonitor

__all__ = [
    "LearningRateMonitor",
]
