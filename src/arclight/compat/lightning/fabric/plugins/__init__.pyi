# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision import BitsandbytesPrecision as BitsandbytesPrecision
from arclight.trainer.fabric.checkpoint_io import CheckpointIO as CheckpointIO
from arclight.fabric.environments import ClusterEnvironment as ClusterEnvironment
from arclight.fabric.precision import DoublePrecision as DoublePrecision
from arclight.fabric.precision import HalfPrecision as HalfPrecision
from arclight.fabric.precision import MixedPrecision as MixedPrecision
from arclight.fabric.precision import Precision as Precision
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO as TorchCheckpointIO
from arclight.fabric.precision import TransformerEnginePrecision as TransformerEnginePrecision
from . import collectives as collectives
from . import environments as environments
from . import io as io
from . import precision as precision
from arclight._lazy import Refused as _Refused

__all__ = [
    "BitsandbytesPrecision",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TorchCheckpointIO",
    "TransformerEnginePrecision",
]
class DeepSpeedPrecision(_Refused): ...
class XLACheckpointIO(_Refused): ...
class XLAPrecision(_Refused): ...
