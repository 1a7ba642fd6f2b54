# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY
from arclight.fabric.accelerators import Accelerator as Accelerator
from arclight.fabric.accelerators import CPUAccelerator as CPUAccelerator
from arclight.fabric.accelerators import CUDAAccelerator as CUDAAccelerator
from arclight.fabric.accelerators import MPSAccelerator as MPSAccelerator
from arclight.fabric.accelerators import find_usable_cuda_devices as find_usable_cuda_devices
from . import accelerator as accelerator
from . import cpu as cpu
from . import cuda as cuda
from . import mps as mps
from . import registry as registry
from . import xla as xla
from arclight._lazy import Refused as _Refused

__all__ = [
    "ACCELERATOR_REGISTRY",
    "Accelerator",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "find_usable_cuda_devices",
]
class XLAAccelerator(_Refused): ...
