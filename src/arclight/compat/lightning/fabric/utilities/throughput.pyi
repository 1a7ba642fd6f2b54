# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.throughput import Throughput as Throughput
from arclight.trainer.throughput import ThroughputMonitor as ThroughputMonitor
from arclight.trainer.throughput import get_available_flops as get_available_flops
from arclight.trainer.throughput import measure_flops as measure_flops

__all__ = [
    "Throughput",
    "ThroughputMonitor",
    "get_available_flops",
    "measure_flops",
]
