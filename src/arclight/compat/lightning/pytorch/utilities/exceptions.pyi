# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.errors import MisconfigurationError as MisconfigurationException
from arclight.fabric.errors import SIGTERMException as SIGTERMException
from arclight.trainer.loop.progress import StopRun as __TunerExitException

__all__ = [
    "MisconfigurationException",
    "SIGTERMException",
]
_TunerExitException = __TunerExitException
