# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
from arclight.trainer.profilers.pytorch import RegisterRecordFunction as RegisterRecordFunction
from arclight.trainer.profilers.pytorch import StageSchedule as ScheduleWrapper
from arclight.trainer.profilers.pytorch import warning_cache as warning_cache

__all__ = [
    "PyTorchProfiler",
    "RegisterRecordFunction",
    "ScheduleWrapper",
    "warning_cache",
]
