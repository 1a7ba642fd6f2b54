# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import CheckpointIO as CheckpointIO
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
from . import checkpoint_io as checkpoint_io
from . import torch_io as torch_io
from arclight._lazy import Refused as _Refused

__all__ = [
    "CheckpointIO",
    "TorchCheckpointIO",
]
class XLACheckpointIO(_Refused): ...
