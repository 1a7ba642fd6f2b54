# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler as GradientAccumulationScheduler

__all__ = [
    "GradientAccumulationScheduler",
]
