# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies import DDPStrategy as DDPStrategy
from arclight.fabric.strategies import FSDPStrategy as FSDPStrategy
from arclight.fabric.strategies import ModelParallelStrategy as ModelParallelStrategy
from arclight.fabric.strategies import ParallelStrategy as ParallelStrategy
from arclight.fabric.strategies.strategy_registry import STRATEGY_REGISTRY as STRATEGY_REGISTRY
from arclight.fabric.strategies import SingleDeviceStrategy as SingleDeviceStrategy
from arclight.fabric.strategies import Strategy as Strategy
from . import ddp as ddp
from . import deepspeed as deepspeed
from . import dp as dp
from . import fsdp as fsdp
from . import model_parallel as model_parallel
from . import parallel as parallel
from . import registry as registry
from . import single_device as single_device
from . import single_xla as single_xla
from . import strategy as strategy
from . import xla as xla
from . import xla_fsdp as xla_fsdp
from arclight._lazy import Refused as _Refused

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "STRATEGY_REGISTRY",
    "SingleDeviceStrategy",
    "Strategy",
]
class DataParallelStrategy(_Refused): ...
class DeepSpeedStrategy(_Refused): ...
class SingleDeviceXLAStrategy(_Refused): ...
class XLAFSDPStrategy(_Refused): ...
class XLAStrategy(_Refused): ...
