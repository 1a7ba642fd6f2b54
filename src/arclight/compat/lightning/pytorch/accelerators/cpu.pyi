# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.devices import CPUAccelerator as CPUAccelerator
from arclight.fabric.accelerators.devices import get_cpu_stats as get_cpu_stats

__all__ = [
    "CPUAccelerator",
    "get_cpu_stats",
]
