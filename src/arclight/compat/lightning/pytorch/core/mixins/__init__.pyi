# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import HyperparametersMixin as HyperparametersMixin
from . import hparams_mixin as hparams_mixin

__all__ = [
    "HyperparametersMixin",
]
