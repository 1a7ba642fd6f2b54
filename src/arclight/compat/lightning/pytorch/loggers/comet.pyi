# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.comet_logger import CometLogger as CometLogger
from arclight.compat.lightning.utilities import _COMET_AVAILABLE as _COMET_AVAILABLE

__all__ = [
    "CometLogger",
]
