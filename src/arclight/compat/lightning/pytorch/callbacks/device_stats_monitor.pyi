# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.monitoring.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor

__all__ = [
    "DeviceStatsMonitor",
]
