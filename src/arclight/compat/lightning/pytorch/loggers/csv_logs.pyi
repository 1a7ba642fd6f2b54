# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.csv_logger import CSVLogger as CSVLogger
from arclight.trainer.loggers.csv_logger import ExperimentWriter as ExperimentWriter

__all__ = [
    "CSVLogger",
    "ExperimentWriter",
]
