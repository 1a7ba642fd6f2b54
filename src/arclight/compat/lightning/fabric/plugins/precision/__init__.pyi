# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.precision import BitsandbytesPrecision as BitsandbytesPrecision
from arclight.fabric.precision import DoublePrecision as DoublePrecision
from arclight.fabric.precision import HalfPrecision as HalfPrecision
from arclight.fabric.precision import MixedPrecision as MixedPrecision
from arclight.fabric.precision import Precision as Precision
from arclight.fabric.precision import TransformerEnginePrecision as TransformerEnginePrecision
from . import amp as amp
from . import bitsandbytes as bitsandbytes
from . import deepspeed as deepspeed
from . import double as double
from . import half as half
from . import precision as precision
from . import transformer_engine as transformer_engine
from . import utils as utils
from . import xla as xla
from arclight._lazy import Refused as _Refused

__all__ = [
    "BitsandbytesPrecision",
    "DoublePrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TransformerEnginePrecision",
]
class DeepSpeedPrecision(_Refused): ...
class XLAPrecision(_Refused): ...
