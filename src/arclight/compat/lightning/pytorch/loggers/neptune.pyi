# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.neptune_logger import NeptuneLogger as NeptuneLogger

__all__ = [
    "NeptuneLogger",
]
