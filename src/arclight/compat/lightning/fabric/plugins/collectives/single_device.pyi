# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.collectives import SingleDeviceCollective as SingleDeviceCollective

__all__ = [
    "SingleDeviceCollective",
]
