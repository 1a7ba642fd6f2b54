# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import HyperparametersMixin as HyperparametersMixin

__all__ = [
    "HyperparametersMixin",
]
