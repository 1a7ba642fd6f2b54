# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.fabric import Fabric as Fabric

__all__ = [
    "Fabric",
]
