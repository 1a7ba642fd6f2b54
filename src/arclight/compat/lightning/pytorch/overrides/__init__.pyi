# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.sampling import UnrepeatedDistributedSampler as UnrepeatedDistributedSampler
from arclight.compat.lightning.sampling import UnrepeatedDistributedSamplerWrapper as UnrepeatedDistributedSamplerWrapper
from . import distributed as distributed

__all__ = [
    "UnrepeatedDistributedSampler",
    "UnrepeatedDistributedSamplerWrapper",
]
