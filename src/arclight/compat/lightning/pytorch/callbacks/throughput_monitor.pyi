# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.monitoring.throughput_monitor import ThroughputMonitor as ThroughputMonitor

__all__ = [
    "ThroughputMonitor",
]
