# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.weights.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
from arclight.trainer.callbacks.weights.weight_averaging import WeightAveraging as WeightAveraging

__all__ = [
    "EMAWeightAveraging",
    "WeightAveraging",
]
