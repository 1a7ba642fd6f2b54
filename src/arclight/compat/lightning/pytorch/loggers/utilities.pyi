# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.hosted_logger import scan_checkpoints as __scan_checkpoints
from arclight.trainer.loggers.hosted_logger import joint_version as __version

__all__ = [
]
_scan_checkpoints = __scan_checkpoints
_version = __version
