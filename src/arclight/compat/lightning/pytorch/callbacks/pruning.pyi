# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.weights.pruning import ModelPruning as ModelPruning

__all__ = [
    "ModelPruning",
]
