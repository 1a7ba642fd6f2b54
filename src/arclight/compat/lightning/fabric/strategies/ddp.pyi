# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.ddp import DDPStrategy as DDPStrategy

__all__ = [
    "DDPStrategy",
]
