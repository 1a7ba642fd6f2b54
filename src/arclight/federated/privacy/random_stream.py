"""Generate pseudo-random numbers from a secret seed with ChaCha20, for masks and noise.

Masks of two clients cancel only if both draw the same numbers, also with different versions of the package: the numbers of a seed must
never change.

`secure_aggregation` masks with it (seeds that two clients share come from `key_agreement`), `noise` draws from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from arclight.fabric.extras import require
from arclight.federated.aggregation.chunks import CHUNK, Array

KEY_BYTES = 32
"""Bytes of a secret."""


def random_words(key: bytes, label: str, chunk: int = CHUNK) -> Iterator[Array]:
    """Yield chunks of int64 words without end, the same for the same secret and label.

    Without the secret the output is indistinguishable from random.

    The array is overwritten by the next. A secret must not serve twice for the same label; labels are hashed to 96 bits.
    """
    cipher = require("cryptography.hazmat.primitives.ciphers", extra="privacy")
    nonce = bytes(4) + hashlib.sha256(label.encode()).digest()[:12]  # four bytes count blocks of 64
    stream = cipher.Cipher(cipher.algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    zeros, drawn = bytes(8 * chunk), bytearray(8 * chunk)
    while True:
        stream.update_into(zeros, drawn)
        yield np.frombuffer(drawn, dtype="<i8")


def add_random_words(key: bytes, label: str, sums: torch.Tensor, sign: int = 1) -> None:
    """Add (or subtract) the stream to flat int64 ``sums`` in place, modulo 2^64."""
    flat: Any = sums.numpy()
    source = random_words(
        key, label, min(CHUNK, len(flat))
    )  # the same stream in smaller pieces: tensors may be small, and many
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        drawn = next(source)[: len(part)]
        if sign > 0:
            np.add(part, drawn, out=part)
        else:
            np.subtract(part, drawn, out=part)


def random_normals(key: bytes, label: str) -> Iterator[torch.Tensor]:
    """Yield chunks of `CHUNK` standard normal float64 without end, from 53-bit uniforms."""
    for drawn in random_words(key, label):
        uniform = ((drawn.view("<u8") >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        yield torch.special.ndtri(torch.from_numpy(uniform))


def add_noise(key: bytes, label: str, tensor: torch.Tensor, deviation: float) -> None:
    """Add normal noise of that deviation to a dense float tensor in place, in float64."""
    flat = tensor.view(-1)
    source = random_normals(key, label)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        part.copy_(part.to(torch.float64) + deviation * next(source)[: part.numel()])
