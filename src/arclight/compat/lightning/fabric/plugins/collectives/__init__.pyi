# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.collectives import Collective as Collective
from arclight.compat.lightning.collectives import SingleDeviceCollective as SingleDeviceCollective
from arclight.compat.lightning.collectives import TorchCollective as TorchCollective
from . import collective as collective
from . import single_device as single_device
from . import torch_collective as torch_collective

__all__ = [
    "Collective",
    "SingleDeviceCollective",
    "TorchCollective",
]
