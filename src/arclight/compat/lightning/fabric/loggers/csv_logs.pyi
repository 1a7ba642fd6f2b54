# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.fabric_loggers import FabricCSVLogger as CSVLogger
from arclight.trainer.loggers.csv_logger import ExperimentWriter as __ExperimentWriter

__all__ = [
    "CSVLogger",
]
_ExperimentWriter = __ExperimentWriter
