# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.collectives import SingleDeviceCollective as SingleDeviceCollective

__all__ = [
    "SingleDeviceCollective",
]
