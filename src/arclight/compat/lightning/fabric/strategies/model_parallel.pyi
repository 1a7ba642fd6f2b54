# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy

__all__ = [
    "ModelParallelStrategy",
]
