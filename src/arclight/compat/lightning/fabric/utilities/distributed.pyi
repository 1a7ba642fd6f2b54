# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.sampling import DistributedSamplerWrapper as DistributedSamplerWrapper
from arclight.compat.lightning.utilities import is_shared_filesystem as is_shared_filesystem

__all__ = [
    "DistributedSamplerWrapper",
    "is_shared_filesystem",
]
