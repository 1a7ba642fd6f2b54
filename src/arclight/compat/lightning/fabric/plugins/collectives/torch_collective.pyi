# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.collectives import TorchCollective as TorchCollective

__all__ = [
    "TorchCollective",
]
