# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.managed_optimizer import ManagedOptimizer as LightningOptimizer

__all__ = [
    "LightningOptimizer",
]
