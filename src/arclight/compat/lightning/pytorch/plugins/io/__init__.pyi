# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO as AsyncCheckpointIO
from arclight.trainer.fabric.checkpoint_io import CheckpointIO as CheckpointIO
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
from . import async_plugin as async_plugin
from arclight._lazy import Refused as _Refused

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "TorchCheckpointIO",
]
class HPUCheckpointIO(_Refused): ...
class XLACheckpointIO(_Refused): ...
