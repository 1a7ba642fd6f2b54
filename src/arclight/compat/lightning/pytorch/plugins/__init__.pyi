# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO as AsyncCheckpointIO
from arclight.fabric.precision import BitsandbytesPrecision as BitsandbytesPrecision
from arclight.trainer.fabric.checkpoint_io import CheckpointIO as CheckpointIO
from arclight.fabric.precision import DoublePrecision as DoublePrecision
from arclight.fabric.precision import HalfPrecision as HalfPrecision
from arclight.fabric.strategies.layer_sync import LayerSync as LayerSync
from arclight.fabric.precision import MixedPrecision as MixedPrecision
from arclight.fabric.precision import Precision as Precision
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
from arclight.fabric.strategies.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm
from arclight.fabric.precision import TransformerEnginePrecision as TransformerEnginePrecision
from . import environments as environments
from . import io as io
from . import layer_sync as layer_sync
from . import precision as precision
from arclight._lazy import Refused as _Refused

__all__ = [
    "AsyncCheckpointIO",
    "BitsandbytesPrecision",
    "CheckpointIO",
    "DoublePrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
    "TransformerEnginePrecision",
]
class DeepSpeedPrecision(_Refused): ...
class HPUCheckpointIO(_Refused): ...
class HPUPrecisionPlugin(_Refused): ...
class XLACheckpointIO(_Refused): ...
class XLAPrecision(_Refused): ...
