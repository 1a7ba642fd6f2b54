# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.weights.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging

__all__ = [
    "StochasticWeightAveraging",
]
