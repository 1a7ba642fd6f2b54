"""Compute any element of a shuffled sequence without storing the sequence.

A permutation of ``size`` elements is an alternating Feistel network over Z_a x Z_b with a * b slightly above ``size``
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002); a result outside is permuted again until it is inside.

`computed_order` and `mixture` permute samples by this, ``federated.coordination.sampling`` draws clients, and
``federated.simulation.fleet`` takes keys. No bit of a result may change: it would be another training run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_ROUNDS = 12  # a small domain mixes slowly; four are enough for a large one
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # SplitMix64 (Steele et al. 2014)


def keys_of(*parts: int | npt.NDArray[Any]) -> Keys:
    """Return a 64-bit key for each combination of integers; arrays broadcast.

    The result has at least one dimension.
    """
    key = np.zeros(1, np.uint64)
    for part in parts:
        word = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        key = _mix(key * _GOLDEN + _mix(word + _GOLDEN))
    return key


def permute(positions: npt.ArrayLike, size: int, key: Keys) -> Ints:
    """Permute positions of a sequence of ``size`` elements: a bijection of 0..size - 1.

    positions: integers in [0, size), any number of them in one dimension. key: one for all, or one for each, see
    `keys_of`. Takes memory for what is asked for only. Raises ValueError for a position outside the sequence.
    """
    flat = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise ValueError(f"positions {flat.min()}..{flat.max()} of a sequence of {size} elements")
    values = flat.astype(np.uint64)
    keys = np.broadcast_to(key, values.shape)
    high = math.isqrt(max(0, size - 1)) + 1
    low = -(-size // high)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _network(values[outside], np.uint64(high), np.uint64(max(1, low)), keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def permute_in_windows(positions: npt.ArrayLike, size: int, key: Keys, window: int | None) -> Ints:
    """Permute so that elements within ``window`` of each other stay near.

    Windows are permuted, and elements within each; see `permute`. The last window, if it is short, stays the last.
    None: one window of all.
    """
    if window is None or window >= size:
        return permute(positions, size, key)
    flat = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    keys = np.broadcast_to(key, flat.shape)
    number, place = np.divmod(flat, window)
    whole = size // window
    full = number < whole
    found = np.empty_like(flat)
    chosen = permute(number[full], whole, keys[full])
    found[full] = chosen * window + permute(
        place[full], window, _mix(keys[full] + _mix(chosen.astype(np.uint64) + _GOLDEN))
    )
    if not full.all():
        found[~full] = whole * window + permute(place[~full], size - whole * window, _mix(keys[~full] + _GOLDEN))
    return found


def _network(values: Keys, high: np.uint64, low: np.uint64, key: Keys) -> Keys:
    left, right = values // low, values % low
    for number in range(_ROUNDS):
        key = key + _GOLDEN
        if number % 2:
            right = (right + _mix(left + _mix(key)) % low) % low
        else:
            left = (left + _mix(right + _mix(key)) % high) % high
    return left * low + right


def _mix(word: Keys) -> Keys:
    """Apply the finaliser of SplitMix64: every bit of the word reaches every bit of the result."""
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))
