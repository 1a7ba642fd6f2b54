# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from arclight.trainer.profilers.profiler import PassThroughProfiler as PassThroughProfiler
from arclight.trainer.profilers.profiler import Profiler as Profiler
from arclight.trainer.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
from arclight.trainer.profilers.simple import SimpleProfiler as SimpleProfiler
from . import advanced as advanced
from . import base as base
from . import profiler as profiler
from . import pytorch as pytorch
from . import simple as simple
from . import xla as xla
from arclight._lazy import Refused as _Refused

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
]
class XLAProfiler(_Refused): ...
