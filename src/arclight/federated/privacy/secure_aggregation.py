"""Sum masked updates by secure aggregation, hiding single clients' updates from the server.

The server learns the sum modulo 2^64, and nothing of a single client's values. (Weights, metrics and who took part are not hidden.)

After Bonawitz et al. (2017, "Practical Secure Aggregation", protocol for a server that is curious but follows the protocol)
with the sparse partners of Bell et al. (2020). A round goes:

1. Each client makes keys and sends the public ones (`Participant.keys`); those that do are the round's `Cohort`.
2. Each sends every partner, encrypted, a share of two secrets: its mask key and the seed of its own mask (`share`). A client
   that cannot decrypt one reports it (`unreadable`), and one of the two is left out before anything is masked.
3. Each adds to its values a mask of its own and, for every partner, one that the partner subtracts (`mask`).
4. The server names the clients whose masked values it has. Each reveals its shares of these clients' own seeds, and of the mask
   keys of those that dropped out (`reveal`), never both of one client. From enough shares the server unmasks the sum (`MaskedSum`).

Values are terms as in `aggregation.fixed_point`, of a shift that is fixed in advance (`fixed_point_shift`), so a mean is as exact as that shift
allows.

``clients.secure_sum_client`` runs a `Participant`, ``server.secure_sums`` a `MaskedSum`. Masks, labels and shift must be the same on
both sides: they are part of the protocol.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from arclight.federated.aggregation.chunks import ChunkedTensor, chunk_workers
from arclight.federated.errors import FederatedError
from arclight.federated.privacy import key_agreement
from arclight.federated.privacy.key_agreement import (
    NONCE,
    TAG,
    Cohort,
    PrivateKey,
    PublicKeys,
    decrypt_share,
    encrypt_share,
)
from arclight.federated.privacy.random_stream import KEY_BYTES, add_random_words
from arclight.federated.privacy.settings import SecureSum

log = logging.getLogger(__name__)

_BITS = 62
"""Bits of the largest sum, without its sign."""

OWN_MASK = "own"

ENCRYPTED_SHARE_BYTES = NONCE + 2 * key_agreement.SHARE_BYTES + TAG
"""Bytes of a client's encrypted shares for one partner."""


@dataclass(frozen=True, kw_only=True)
class RevealedShares:
    """Shares that a client gives at the end, by the client whose secrets they are of."""

    client: str
    seeds: dict[str, int] = field(default_factory=dict)
    """Shares of the seeds of clients whose values have arrived."""
    keys: dict[str, int] = field(default_factory=dict)
    """Shares of the mask keys of clients whose values have not."""


class Participant:
    """One client's side of a secure sum. Its secrets are used once and leave it only as shares."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._mask, self._cipher, self._seed = PrivateKey(), PrivateKey(), os.urandom(KEY_BYTES)
        self._held: dict[str, tuple[int, int]] = {}
        self._revealed: frozenset[str] | None = None

    @property
    def keys(self) -> PublicKeys:
        seal = hashlib.sha256(self._seed).digest()
        return PublicKeys(client=self.client, mask=self._mask.public, cipher=self._cipher.public, seal=seal)

    def share(self, cohort: Cohort, keys: Mapping[str, PublicKeys]) -> dict[str, bytes]:
        """Encrypt for every partner its shares of this client's secrets.

        Keys: the cohort's, by name.
        """
        mine = keys.get(self.client)
        if mine != self.keys:
            raise FederatedError(f"the keys of {self.client} are not those that it gave: somebody changes what is sent")
        partners = cohort.partners_of(self.client)
        if lost := [name for name in partners if name not in keys or keys[name].client != name]:
            raise FederatedError(f"{self.client} has no keys of its partner {lost[0]} in round {cohort.number}")
        if len({(keys[name].mask, keys[name].cipher) for name in (*partners, self.client)}) <= len(partners):
            raise FederatedError(f"two partners of {self.client} have the same keys: somebody stands in for another")
        self._cohort, self._keys = cohort, {name: keys[name] for name in partners}
        holders, needed = cohort.holders(self.client), cohort.threshold_of(self.client)
        seeds = key_agreement.split_secret(self._seed, len(holders), needed)
        masks = key_agreement.split_secret(self._mask.raw, len(holders), needed)
        sent = {}
        for place, holder in enumerate(holders, 1):
            if holder == self.client:
                self._held[holder] = (seeds[place], masks[place])
            else:
                text = b"".join(
                    part.to_bytes(key_agreement.SHARE_BYTES, "big") for part in (seeds[place], masks[place])
                )
                sent[holder] = encrypt_share(self._with(holder), text, self._about(self.client, holder))
        return sent

    def unreadable(self, received: Mapping[str, bytes]) -> tuple[str, ...]:
        """Name the senders whose shares cannot be read: this client masks with none of them."""
        return tuple(sender for sender in received if self._read(sender, received[sender]) is None)

    def _read(self, sender: str, sealed: bytes) -> tuple[int, int] | None:
        text = (
            decrypt_share(self._with(sender), sealed, self._about(sender, self.client))
            if sender in self._keys
            else None
        )
        if text is None or len(text) != 2 * key_agreement.SHARE_BYTES:
            return None
        return int.from_bytes(text[: key_agreement.SHARE_BYTES], "big"), int.from_bytes(
            text[key_agreement.SHARE_BYTES :], "big"
        )

    def mask(
        self, received: Mapping[str, bytes], values: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every key's int64 values with the masks added modulo 2^64, flat, one at a time.

        received: what partners wrote to this client; those that are not among them have left and share no masks.
        Raises FederatedError if an encrypted share was changed on its way, or too few partners are left for anything to be hidden.
        """
        for sender, sealed in received.items():
            if sender not in self._keys:
                raise FederatedError(f"{sender} wrote to {self.client} and is not a partner of it")
            if (parts := self._read(sender, sealed)) is None:
                raise FederatedError(
                    f"what {sender} wrote to {self.client} was changed on its way, or is not for this round"
                )
            self._held[sender] = parts
        needed = self._cohort.threshold_of(self.client)
        if len(self._held) < needed:
            raise FederatedError(
                f"{self.client} has {len(self._held) - 1} partners left in round {self._cohort.number}, "
                f"{needed - 1} are needed to hide its values: nothing is sent"
            )
        pairs = {name: self._pair(name) for name in received}

        def masked() -> Iterator[tuple[str, torch.Tensor]]:
            for key, tensor in values.items():
                sums = tensor.to(torch.int64).reshape(-1).clone()
                add_random_words(self._seed, f"{OWN_MASK}|{key}", sums)
                for partner, secret in pairs.items():
                    add_random_words(secret, key, sums, 1 if self.client < partner else -1)
                yield key, sums

        return masked()

    def reveal(self, here: Collection[str]) -> RevealedShares:
        """Return shares of the survivors' seeds, and of the mask keys of the others.

        Raises FederatedError if asked again with other names, which would give both secrets of a client away, or if so few
        are left that a sum would reveal too much.
        """
        names = frozenset(here)
        if self._revealed is not None and names != self._revealed:
            raise FederatedError(
                f"{self.client} was asked twice whose values have come, with different names: it refuses"
            )
        known = names & set(self._held)
        if self.client not in names or len(known) < self._cohort.threshold_of(self.client):
            raise FederatedError(
                f"{self.client} is to help to take masks away from {len(known)} values of its cohort, "
                f"{self._cohort.threshold_of(self.client)} and its own are needed: it refuses"
            )
        self._revealed = names
        return RevealedShares(
            client=self.client,
            seeds={name: seed for name, (seed, _) in self._held.items() if name in names},
            keys={name: key for name, (_, key) in self._held.items() if name not in names},
        )

    def _with(self, partner: str) -> bytes:
        return self._cipher.derive(
            self._keys[partner].cipher, self._cohort.about("encrypted_shares", self.client, partner)
        )

    def _pair(self, partner: str) -> bytes:
        return self._mask.derive(self._keys[partner].mask, self._cohort.about("mask", self.client, partner))

    def _about(self, sender: str, receiver: str) -> bytes:
        return self._cohort.about("encrypted_shares", sender, receiver) + f"|{sender}>{receiver}".encode()


class MaskedSum:
    """The server's side of a secure sum: the survivors, and the shares that remove their masks.

    here: clients whose masked values are in the sum. sharers: those who mask with each other, `here` among them: they have sent encrypted
    shares that their partners could read. Raises FederatedError naming a client too few of whose partners are left.
    """

    def __init__(
        self, cohort: Cohort, keys: Mapping[str, PublicKeys], sharers: Iterable[str], here: Iterable[str]
    ) -> None:
        self._cohort, self._keys = cohort, dict(keys)
        self.survivors, self._written = frozenset(here), frozenset(sharers)
        if strange := sorted(self.survivors - self._written):
            raise FederatedError(f"{strange[0]} sent masked values and had not shared its secrets")
        self._seeds: dict[str, dict[int, int]] = {}
        self._parts: dict[str, dict[int, int]] = {}
        self._revealed: set[str] = set()
        self._wrong: set[str] = set()
        """Partners that gave wrong parts."""
        for client in sorted(self._concerned()):
            left = sum(holder in self.survivors for holder in cohort.holders(client))
            if left < cohort.threshold_of(client):
                raise FederatedError(
                    f"the secure sum of round {cohort.number} cannot be opened: {left} of {client}'s cohort have sent their values, "
                    f"{cohort.threshold_of(client)} are needed; {len(self._written) - len(self.survivors)} of {len(self._written)} dropped out"
                )

    def _concerned(self) -> set[str]:
        """List the clients whose masks are in the sum.

        Survivors, and those who dropped out with a partner among them.
        """
        partners = {partner for client in self.survivors for partner in self._cohort.partners_of(client)}
        return set(self.survivors) | (partners & self._written)

    def add(self, revealed: RevealedShares) -> None:
        """Add a client's shares.

        Raises FederatedError for one who is not of the sum, or gives what it was not asked for.
        """
        if revealed.client not in self.survivors:
            raise FederatedError(f"{revealed.client} is not of this sum")
        for parts, of_here, found in ((revealed.seeds, True, self._seeds), (revealed.keys, False, self._parts)):
            for client, part in parts.items():
                holders = self._cohort.holders(client)
                if (client in self.survivors) != of_here or revealed.client not in holders:
                    raise FederatedError(f"{revealed.client} gave a part of {client} that it was not asked for")
                found.setdefault(client, {})[holders.index(revealed.client) + 1] = part
        self._revealed.add(revealed.client)

    @property
    def silent(self) -> list[str]:
        """List the clients of the sum that have given no shares."""
        return sorted(self.survivors - self._revealed)

    def missing(self) -> dict[str, int]:
        """Count the shares still missing, by client."""
        found = {}
        for client in self._concerned():
            parts = (self._seeds if client in self.survivors else self._parts).get(client, {})
            if len(parts) < self._cohort.threshold_of(client):
                found[client] = self._cohort.threshold_of(client) - len(parts)
        return found

    def open(self) -> Unmasking:
        """Return what removes the masks.

        Raises FederatedError naming whose secrets are incomplete or wrong.
        """
        if short := sorted(self.missing().items()):
            client, count = short[0]
            silent = ", ".join(self.silent) or "nobody"
            raise FederatedError(
                f"{count} more parts of {client}'s secret are needed to open round {self._cohort.number}'s sum; no message from: {silent}"
            )
        seeds: dict[str, bytes] = {}
        pairs: list[tuple[bytes, int]] = []
        for client in sorted(self._concerned()):
            public = self._keys[client]
            if client in self.survivors:
                seeds[client] = self._joined(client, _sealed(public.seal))
                continue
            raw = self._joined(client, _of_key(public.mask))
            for partner in self._cohort.partners_of(client):
                if partner in self.survivors:
                    about = self._cohort.about("mask", client, partner)
                    pairs.append(
                        (PrivateKey(raw).derive(self._keys[partner].mask, about), 1 if partner < client else -1)
                    )
        return Unmasking(list(seeds.values()), pairs)

    def _joined(self, client: str, is_right: Callable[[bytes], bool]) -> bytes:
        """Join a client's secret, without a partner that gives wrong shares if others suffice.

        Raises FederatedError if no one partner's absence makes it right.
        """
        holders, needed = self._cohort.holders(client), self._cohort.threshold_of(client)
        parts = (self._seeds if client in self.survivors else self._parts)[client]
        trusted = [place for place in parts if holders[place - 1] not in self._wrong] or list(parts)
        for without in (None, *trusted[:needed]):
            chosen = [place for place in trusted if place != without][:needed]
            if len(chosen) < needed:
                continue
            secret = key_agreement.join_shares({place: parts[place] for place in chosen}, KEY_BYTES)
            if secret is not None and is_right(secret):
                if without is not None:
                    self._wrong.add(holders[without - 1])
                    log.warning(
                        "round %d: %s gave a wrong part of %s's secret",
                        self._cohort.number,
                        holders[without - 1],
                        client,
                    )
                return secret
        what, other = ("seed", "what it sealed") if client in self.survivors else ("key", "its public key")
        raise FederatedError(f"the parts of {client}'s {what} do not give {other}: a partner gave a wrong one")


def _sealed(seal: bytes) -> Callable[[bytes], bool]:
    return lambda seed: hashlib.sha256(seed).digest() == seal


def _of_key(public: bytes) -> Callable[[bytes], bool]:
    return lambda raw: PrivateKey(raw).public == public


class Unmasking:
    """Remove masks from sums, key by key; made by `MaskedSum.open`."""

    def __init__(self, seeds: list[bytes], pairs: list[tuple[bytes, int]]) -> None:
        self._seeds, self._pairs = seeds, pairs

    def remove(self, key: str, sums: torch.Tensor) -> None:
        """Subtract the masks from the flat int64 sum of one key's masked values, in place."""
        for seed in self._seeds:
            add_random_words(seed, f"{OWN_MASK}|{key}", sums, -1)
        for secret, sign in self._pairs:
            add_random_words(secret, key, sums, -sign)


def fixed_point_shift(settings: SecureSum, clients: int) -> int:
    """Return the shift at which the sum of so many clients' largest terms fits.

    The same for all, known before any value is.
    """
    return _BITS - math.ceil(math.log2(clients * settings.max_weight * settings.largest))


def fixed_point_terms(
    tensor: torch.Tensor, weight: int, shift: int, settings: SecureSum, threads: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return a client's int64 terms ``round(x * weight * 2^shift)``, and how many were clipped.

    Raises FederatedError for values that are not finite, and for a weight that is no count within the settings.
    """
    if not 1 <= weight <= settings.max_weight:
        raise FederatedError(f"a weight in a secure sum is from 1 to {settings.max_weight}, got {weight}")
    values = ChunkedTensor(tensor)
    made = torch.empty(values.elements, dtype=torch.int64)
    flat, factor, largest = made.numpy(), math.ldexp(weight, shift), settings.largest

    def work(start: int, stop: int, scratch: Any) -> int:
        wide = values.wide(start, stop, scratch.wide, scratch)
        if not np.isfinite(wide).all():
            raise FederatedError(
                "a value that is not finite cannot go into a secure sum: this client's training has gone wrong"
            )
        cut = int(np.count_nonzero(np.abs(wide, out=scratch.other[: stop - start]) > largest))
        np.clip(wide, -largest, largest, out=wide)
        wide *= factor
        np.copyto(flat[start:stop], np.rint(wide, out=wide), casting="unsafe")
        return cut

    with chunk_workers(threads) as workers:
        return made, sum(workers.map_chunks(values.elements, work))
