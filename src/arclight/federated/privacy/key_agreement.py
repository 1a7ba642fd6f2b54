"""Agree on pairwise secrets for a secure sum, split them among partners, encrypt the shares.

`secure_aggregation` builds both sides of a sum on it, ``server.secure_sums`` and ``clients.secure_sum_client`` compute the same `Cohort` by it.
Key derivation, order of partners, and formats of keys and shares are part of the protocol.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arclight.fabric.extras import require
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.random_stream import KEY_BYTES

_CIPHERS = "cryptography.hazmat.primitives.ciphers.aead"
_X25519 = "cryptography.hazmat.primitives.asymmetric.x25519"
NONCE, TAG = 12, 16
"""Bytes that `encrypt_share` adds."""


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The clients of one secure sum and their partners: the same wherever it is computed."""

    run: str
    number: int
    clients: tuple[str, ...]
    """Clients that have sent keys."""
    partners: int | None = None
    """Partners of each client, an even number; None for all others."""
    threshold: float = 0.67
    """Share of a client's cohort (its partners and itself) that must stay."""
    _around: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(set(self.clients)) != len(self.clients) or len(self.clients) < 2:
            raise FederatedError(f"a secure sum needs at least two different clients, got {', '.join(self.clients)}")

        def drawn(client: str) -> bytes:
            return hashlib.sha256(f"{self.run}|{self.number}|{client}".encode()).digest()

        around = {client: place for place, client in enumerate(sorted(self.clients, key=drawn))}
        object.__setattr__(self, "_around", around)

    def partners_of(self, client: str) -> tuple[str, ...]:
        """Return a client's partners by name.

        With fewer than all, the nearest on both sides of a ring in an order drawn by hash (Bell et al. 2020, 3.2).
        """
        if client not in self._around:
            raise FederatedError(f"{client} is not of round {self.number}'s secure sum")
        count = len(self.clients)
        if self.partners is None or self.partners >= count - 1:
            return tuple(sorted(other for other in self.clients if other != client))
        ring = list(self._around)
        here = self._around[client]
        sides = (step for step in range(-(self.partners // 2), self.partners // 2 + 1) if step)
        return tuple(sorted(ring[(here + step) % count] for step in sides))

    def holders(self, client: str) -> tuple[str, ...]:
        """Return the holders of shares of a client's secrets: its partners and itself, by name.

        A share's place is the number here, from 1.
        """
        return tuple(sorted((*self.partners_of(client), client)))

    def threshold_of(self, client: str) -> int:
        """Return how many of these must give their shares; always more than half."""
        count = len(self.holders(client))
        return min(count, max(count // 2 + 1, -int(-self.threshold * count // 1)))

    def about(self, what: str, first: str, second: str) -> bytes:
        """Return the purpose that a derived key is bound to.

        It names what the key is for, the run, the round and the two clients.
        """
        one, other = sorted((first, second))
        return repr(("arclight", what, self.run, self.number, one, other)).encode()


@dataclass(frozen=True, kw_only=True)
class PublicKeys:
    """The public keys of a client at the beginning of a round."""

    client: str
    mask: bytes
    """Public key from which masks come, raw X25519."""
    cipher: bytes
    """Public key with which others encrypt shares for it."""
    seal: bytes
    """SHA-256 of its own mask's seed, by which joined shares are checked."""


class PrivateKey:
    """A private X25519 key."""

    def __init__(self, raw: bytes | None = None) -> None:
        self.raw = os.urandom(KEY_BYTES) if raw is None else raw
        self._key: Any = require(_X25519, extra="privacy").X25519PrivateKey.from_private_bytes(self.raw)

    @property
    def public(self) -> bytes:
        raw: bytes = self._key.public_key().public_bytes_raw()
        return raw

    def derive(self, public: bytes, about: bytes) -> bytes:
        """Derive the secret shared with the other key's holder, for one purpose.

        X25519, HKDF-SHA-256.
        """
        x25519, hashes = (
            require(_X25519, extra="privacy"),
            require("cryptography.hazmat.primitives.hashes", extra="privacy"),
        )
        hkdf = require("cryptography.hazmat.primitives.kdf.hkdf", extra="privacy")
        try:
            agreed = self._key.exchange(x25519.X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise FederatedError(f"a public key that is none: {error}") from error
        derived: bytes = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=about).derive(agreed)
        return derived


def encrypt_share(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate (ChaCha20-Poly1305), bound to ``about``."""
    nonce = os.urandom(NONCE)
    sealed: bytes = require(_CIPHERS, extra="privacy").ChaCha20Poly1305(key).encrypt(nonce, text, about)
    return nonce + sealed


def decrypt_share(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """Invert `encrypt_share`; None for anything not made with this key for this purpose."""
    wrong = require("cryptography.exceptions", extra="privacy").InvalidTag
    try:
        text: bytes = (
            require(_CIPHERS, extra="privacy").ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
        )
    except (wrong, ValueError):
        return None
    return text


PRIME = 2**521 - 1
"""Prime of the field; a Mersenne prime beyond any secret of 64 bytes."""

SHARE_BYTES = 66
"""Bytes of a share."""


def split_secret(secret: bytes, count: int, threshold: int) -> dict[int, int]:
    """Split a secret into shares by place 1 to ``count`` (Shamir 1979).

    Shares are values of a random polynomial of degree ``threshold - 1`` whose value at 0 is the secret: any ``threshold`` give it back,
    fewer say nothing.
    """
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


def join_shares(parts: Mapping[int, int], length: int) -> bytes | None:
    """Join a secret from at least ``threshold`` shares, by Lagrange's formula at 0.

    None if the parts are not those of such a secret; other wrong parts give another secret: compare it with what is known of it.
    """
    result = 0
    for place, value in parts.items():
        above, below = 1, 1
        for other in parts:
            if other != place:
                above = above * -other % PRIME
                below = below * (place - other) % PRIME
        result = (result + value * above * pow(below, -1, PRIME)) % PRIME
    return result.to_bytes(SHARE_BYTES, "big")[-length:] if result < 256**length else None
