# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.logger import DummyExperiment as DummyExperiment
from arclight.trainer.loggers.logger import DummyLogger as DummyLogger
from arclight.trainer.loggers.logger import Logger as Logger
from arclight.trainer.loggers.logger import rank_zero_experiment as rank_zero_experiment

__all__ = [
    "DummyExperiment",
    "DummyLogger",
    "Logger",
    "rank_zero_experiment",
]
