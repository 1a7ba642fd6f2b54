# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
from arclight.trainer.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason

__all__ = [
    "EarlyStopping",
    "EarlyStoppingReason",
]
