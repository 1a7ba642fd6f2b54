# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loop.optimizers import ManagedOptimizer as LightningOptimizer

__all__ = [
    "LightningOptimizer",
]
