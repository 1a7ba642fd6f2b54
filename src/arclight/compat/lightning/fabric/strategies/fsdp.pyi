# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy

__all__ = [
    "FSDPStrategy",
]
