# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.weights.finetuning import BackboneFinetuning as BackboneFinetuning
from arclight.trainer.callbacks.weights.finetuning import BaseFinetuning as BaseFinetuning
from arclight.trainer.callbacks.weights.finetuning import multiplicative as multiplicative

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "multiplicative",
]
