# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.base import SingleDeviceStrategy as SingleDeviceStrategy

__all__ = [
    "SingleDeviceStrategy",
]
