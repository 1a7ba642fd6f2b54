# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from arclight.trainer.callbacks.prediction_writer import WriteInterval as WriteInterval

__all__ = [
    "BasePredictionWriter",
    "WriteInterval",
]
