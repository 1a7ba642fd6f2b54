# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.fabric import Fabric as Fabric
from arclight.compat.lightning.names import __version__ as __version__
from arclight.trainer.fabric.wrappers import is_wrapped as is_wrapped
from arclight.fabric.seeding import seed_everything as seed_everything
from . import accelerators as accelerators
from . import fabric as fabric
from . import loggers as loggers
from . import plugins as plugins
from . import strategies as strategies
from . import utilities as utilities
from . import wrappers as wrappers

__all__ = [
    "Fabric",
    "__version__",
    "is_wrapped",
    "seed_everything",
]
