"""Snapshot the RNGs of Python and NumPy, to find forwards that draw from them.

`capture` and `traced_stage` compare snapshots around a forward, and refuse one that draws, since each rank would draw other numbers.
"""

from __future__ import annotations

import random
import sys
from typing import Any

GLOBAL_RNG_ADVICE = (
    "numbers of Python's or numpy's random generator are drawn between the parts of the model, where every stage would draw its own: "
    "draw them where batches are made (data set, on_after_batch_transfer), or inside a part"
)


def global_rng_state() -> tuple[Any, ...]:
    """Snapshot the states of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, key, *rest = numpy.random.get_state(legacy=True)
    return random.getstate(), key.tobytes(), *rest
