"""A secret in n parts of which any t give it back and fewer say nothing (Shamir 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
"""Of the field; a Mersenne prime beyond any secret of 64 bytes."""

BYTES = 66
"""That a part takes."""


def split(secret: bytes, count: int, threshold: int) -> dict[int, int]:
    """Parts by their places 1 to ``count``: values of a random polynomial of degree ``threshold - 1`` whose value at 0 is the secret."""
    if not 1 <= threshold <= count:
        raise ValueError(f"{threshold} of {count} parts cannot be")
    if len(secret) > 64:
        raise ValueError(f"a secret has at most 64 bytes, got {len(secret)}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]

    def value(place: int) -> int:
        result = 0
        for coefficient in reversed(coefficients):
            result = (result * place + coefficient) % PRIME
        return result

    return {place: value(place) for place in range(1, count + 1)}


def join(parts: Mapping[int, int], length: int) -> bytes | None:
    """The secret of ``length`` bytes from at least as many parts as its threshold, by Lagrange's formula at 0.

    None where the parts are not those of such a secret; other wrong parts give another secret: compare it with what is known of it.
    """
    result = 0
    for place, value in parts.items():
        above, below = 1, 1
        for other in parts:
            if other != place:
                above = above * -other % PRIME
                below = below * (place - other) % PRIME
        result = (result + value * above * pow(below, -1, PRIME)) % PRIME
    return result.to_bytes(BYTES, "big")[-length:] if result < 256**length else None
