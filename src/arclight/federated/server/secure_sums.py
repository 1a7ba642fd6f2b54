"""Relay a round's secure sum: public keys and encrypted shares; unmask the sum.

`server_run` makes the `SecureSumRelay` and, for each round, a `SecureFold`; `service` passes it the requests of ``clients.secure_sum_client``.
It holds nothing but public keys, encrypted shares, and the shares that clients reveal to unmask the sum. They are kept in ``secure.json``, so
that a server killed after a round was closed can still unmask its sum; clients whose shares are missing send them on request. Files of
earlier versions are read (`_FORMER_FIELDS`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from arclight._intervals import former_table
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.aggregation.chunks import ChunkWorkers
from arclight.federated.aggregation.fixed_point import Contribution, Scale, uneven
from arclight.federated.aggregation.fold import Fold, SinkFactory, emit, mean_of
from arclight.federated.errors import FederatedError, RefusedError, UnopenedError
from arclight.federated.privacy import key_agreement
from arclight.federated.privacy.key_agreement import Cohort, PrivateKey, PublicKeys
from arclight.federated.privacy.random_stream import KEY_BYTES
from arclight.federated.privacy.secure_aggregation import (
    ENCRYPTED_SHARE_BYTES,
    MaskedSum,
    RevealedShares,
    Unmasking,
    fixed_point_shift,
)
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import SecureSumReply, SecureSumRequest
from arclight.federated.settings import Federation

log = logging.getLogger(__name__)

_LONGEST_HELD = 60.0
"""Seconds for which a request is held at most."""
_SIGNATURE = 88
"""Characters of an Ed25519 signature in base64."""
_LOOK = 0.5
"""Seconds between checks of which clients have failed, and of how long a stage has lasted."""


@dataclass
class _State:
    """The state of one round's secure sum, as its file keeps it."""

    round: int = -1
    attempt: int = 0
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    cohort: list[str] | None = None
    encrypted_shares: dict[str, dict[str, str]] = field(default_factory=dict)
    sharers: list[str] | None = None
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    """Client to the partners whose encrypted shares it could not open."""
    maskers: list[str] | None = None
    """Clients that mask with each other."""
    survivors: list[str] | None = None
    revealed: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Clients that the sum goes on without, and why."""


_FORMER_FIELDS = {
    "circle": "cohort", "letters": "encrypted_shares", "written": "sharers", "bad": "unreadable", "sure": "maskers", "here": "survivors"
}  # fmt: skip
"""Fields in files of earlier versions."""


class _SumFile:
    """File of a secure sum's state: a line of all of it, then a line per change.

    A torn last line is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, _State()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines:
            fields = {_FORMER_FIELDS.get(name, name): value for name, value in json.loads(lines[0]).items()}
            self.state = _State(**fields)
            if "maskers" not in fields:  # an older version's, whose clients masked with all that had sent shares
                self.state.maskers = self.state.sharers
            whole = len(lines[0])
            for line in lines[1:]:
                if not line.endswith(b"\n"):  # the server was killed while it wrote this: no node was notified of it
                    break
                try:
                    self._apply(*json.loads(line))
                except ValueError:  # the power failed
                    break
                whole += len(line)
            if whole < sum(map(len, lines)) or not lines[0].endswith(b"\n"):
                self.begin(self.state)

    def begin(self, state: _State) -> None:
        """Start the file with a state."""
        replace_text(self.path, json.dumps(asdict(state)) + "\n")
        self.state = state

    def write(self, name: str, key: str | None, value: Any) -> None:
        """Write a change, then make it. Raises OSError if the disk is full, and nothing has changed."""
        lasting = key is None or name == "revealed"  # what others build upon must survive a power failure
        with self.path.open("ab") as file:
            size = file.tell()
            try:
                file.write(json.dumps([name, key, value]).encode() + b"\n")
                file.flush()
                if lasting:
                    os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)
                raise
        self._apply(name, key, value)

    def _apply(self, name: str, key: str | None, value: Any) -> None:
        name = _FORMER_FIELDS.get(name, name)
        if key is None:
            setattr(self.state, name, value)
        else:
            getattr(self.state, name)[key] = value


class SecureSumRelay:
    """Relay of a run's secure sums, one round at a time: keys, encrypted shares, survivors.

    A request is held until what it waits for is settled.
    """

    def __init__(self, settings: SecureSum, run: str, path: Path, expected: Callable[[int], Collection[str]]) -> None:
        self._settings, self._run, self._expected = settings, run, expected
        lock = threading.RLock()
        self._settled, self._revealed = threading.Condition(lock), threading.Condition(lock)
        self._since: dict[str, float] = {}
        self._sum: MaskedSum | None = None
        self._book = _SumFile(path)
        self._cohort: Cohort | None = None
        self._inbox: dict[str, dict[str, str]] | None = None
        self._look_at = 0.0
        self._closed = False

    def close(self) -> None:
        """Answer all held requests, as the server stops."""
        with self._settled:
            self._closed = True
            self._settled.notify_all()

    def handle(self, message: SecureSumRequest) -> SecureSumReply:
        """Handle a client's message; hold the reply until it is settled, or time is over."""
        until = time.monotonic() + min(max(message.hold_s, 0.0), _LONGEST_HELD)
        wanted = (message.round, message.attempt)
        with self._settled:
            here = self._at()
            if wanted < here or (wanted > here and message.client not in self._expected(message.round)):
                return SecureSumReply(finished=True)
            if wanted > here:
                self._book.begin(_State(round=message.round, attempt=message.attempt))
                self._since.clear()
                self._sum = self._cohort = self._inbox = None
                self._settled.notify_all()
            if self._take(message):
                self._look_at = 0.0
            while True:
                self._settle()
                if self._at() != wanted or self._is_over(message.client):
                    return SecureSumReply(finished=True)
                reply = self._reply_to(message.client, message.waits_for)
                left = until - time.monotonic()
                if reply is not None or left <= 0 or self._closed:
                    return reply or SecureSumReply()
                self._settled.wait(min(left, _LOOK))

    def _at(self) -> tuple[int, int]:
        return self._book.state.round, self._book.state.attempt

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self, message: SecureSumRequest) -> bool:
        """Record what is new in a message; return True if anything is.

        A client that sends invalid values is dropped.
        """
        state, client, write = self._book.state, message.client, self._book.write
        keys = {**(message.keys or {}), "node": message.node}
        if client in state.dropped:
            return False
        try:
            if message.keys is not None and state.keys.get(client) != keys:
                if state.cohort is not None:
                    raise _InvalidMessage(
                        "gave other keys than before: its node was started again"
                        if client in state.keys
                        else "came late"
                    )
                self._check_keys(client, message.keys)
                write("keys", client, keys)
            elif (
                message.encrypted_shares is not None and client not in state.encrypted_shares and state.sharers is None
            ):
                self._check_encrypted_shares(client, message.encrypted_shares)
                write("encrypted_shares", client, dict(message.encrypted_shares))
            elif message.unreadable is not None and client not in state.unreadable and client in (state.sharers or ()):
                write(
                    "unreadable",
                    client,
                    [name for name in message.unreadable if client in state.encrypted_shares.get(name, ())],
                )
            elif message.seed_shares is not None and message.key_shares is not None and client not in state.revealed:
                return self._take_revealed_shares(client, {"seeds": message.seed_shares, "keys": message.key_shares})
            else:
                return False
        except _InvalidMessage as wrong:
            log.warning("round %d: the secure sum continues without %s, which %s", state.round, client, wrong)
            write("dropped", client, str(wrong))
        return True

    def _check_keys(self, client: str, keys: Mapping[str, str]) -> None:
        lengths = {"mask": KEY_BYTES, "cipher": KEY_BYTES, "seal": KEY_BYTES}
        strange = (
            set(keys) - {*lengths, "signature"}
            or not set(lengths) <= set(keys)
            or len(keys.get("signature", "")) > _SIGNATURE
        )
        if strange or not all(_is_hex(keys[name], size) for name, size in lengths.items()):
            raise _InvalidMessage(
                f"gave keys that are none: {', '.join(lengths)} of {KEY_BYTES} bytes are needed, in hexadecimal"
            )
        for name in ("mask", "cipher"):
            try:
                PrivateKey().derive(bytes.fromhex(keys[name]), b"")
            except FederatedError as error:
                raise _InvalidMessage(f"gave a key of which everybody knows the secrets: {error}") from error
            if any(
                other[name].lower() == keys[name].lower() for at, other in self._book.state.keys.items() if at != client
            ):
                raise _InvalidMessage("gave another client's keys as its own")

    def _check_encrypted_shares(self, client: str, shares: Mapping[str, str]) -> None:
        if client not in (self._book.state.cohort or ()):
            raise _InvalidMessage("sent encrypted shares and gave no keys")
        partners = self._cohort_of_round().partners_of(client)
        if set(shares) != set(partners) or not all(_is_hex(text, ENCRYPTED_SHARE_BYTES) for text in shares.values()):
            raise _InvalidMessage(
                f"sent encrypted shares that are none: {ENCRYPTED_SHARE_BYTES} bytes to each of {len(partners)} partners are needed, in hexadecimal"
            )

    def _take_revealed_shares(self, client: str, shares: dict[str, dict[str, str]]) -> bool:
        if client not in (self._book.state.survivors or ()):
            return False
        try:
            if self._sum is not None:
                self._sum.add(_revealed(client, shares))
        except (FederatedError, ValueError) as error:
            raise _InvalidMessage(f"gave parts that cannot be: {error}") from error
        self._book.write("revealed", client, shares)
        self._revealed.notify_all()
        return True

    # -- stages of a sum -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Close the stage that all clients have reached, or that has timed out.

        The time counts from the first client that reached it.
        """
        now, state, write = time.monotonic(), self._book.state, self._book.write
        if now < self._look_at or state.maskers is not None:
            return
        self._look_at = now + _LOOK
        expected = set(self._expected(state.round)) - set(state.dropped)
        if state.cohort is None:
            come = set(state.keys) - set(state.dropped)
            if len(come) > 1 and self._have(expected, come, "keys"):
                write("cohort", None, sorted(come))
        elif state.sharers is None:
            come = set(state.encrypted_shares) - set(state.dropped)
            if self._have(expected & set(state.cohort), come, "encrypted_shares"):
                write("sharers", None, sorted(come))
        else:
            come = (set(state.unreadable) & set(state.sharers)) - set(state.dropped)
            if self._have(expected & set(state.sharers), come, "answers"):
                for client, why in _blamed({name: state.unreadable[name] for name in come}).items():
                    log.warning("round %d: the secure sum continues without %s, which %s", state.round, client, why)
                    write("dropped", client, why)
                    come.discard(client)
                write("maskers", None, sorted(come))
        if self._stage() != self._since.get("stage"):
            self._since["stage"] = self._stage()
            self._look_at = 0.0
            self._settled.notify_all()

    def _stage(self) -> int:
        state = self._book.state
        return sum(one is not None for one in (state.cohort, state.sharers, state.maskers, state.survivors))

    def _have(self, all_: set[str], come: set[str], what: str) -> bool:
        """Return True if all clients have sent this, or the first has waited long enough."""
        if not come:
            return False
        since = self._since.setdefault(what, time.monotonic())
        return all_ <= come or time.monotonic() - since > self._settings.step_timeout_s

    def _is_over(self, client: str) -> bool:
        state = self._book.state
        gone = any(
            names is not None and client not in names
            for names in (state.cohort, state.sharers, state.maskers, state.survivors)
        )
        return gone or client in state.dropped or client in state.revealed

    def _reply_to(self, client: str, until: str | None) -> SecureSumReply | None:
        """Return the reply that a client waits for; None while it is not settled."""
        state = self._book.state
        match until:
            case "cohort" if state.cohort is not None:
                return SecureSumReply(
                    cohort=tuple(state.cohort), keys={name: state.keys[name] for name in state.cohort}
                )
            case "encrypted_shares" if state.sharers is not None:
                return SecureSumReply(encrypted_shares=self._shares_for(client))
            case "maskers" if state.maskers is not None:
                return SecureSumReply(maskers=tuple(state.maskers))
            case "survivors" if state.survivors is not None:
                return SecureSumReply(survivors=tuple(state.survivors))
            case None:
                return SecureSumReply()
        return None

    def _shares_for(self, client: str) -> dict[str, str]:
        if self._inbox is None:
            self._inbox = {name: {} for name in self._book.state.cohort or ()}
            for sender in self._book.state.sharers or ():
                for receiver, text in self._book.state.encrypted_shares[sender].items():
                    self._inbox[receiver][sender] = text
        return self._inbox[client]

    def open(self, number: int, here: Iterable[str]) -> Unmasking:
        """Return the unmasking of these clients' sum; waits for their shares.

        Raises UnopenedError if too few are left, or do not give them in time.
        """
        try:
            return self._open(number, here)
        except FederatedError as error:
            raise UnopenedError(str(error)) from error

    def _open(self, number: int, here: Iterable[str]) -> Unmasking:
        with self._settled:
            state, names = self._book.state, sorted(here)
            if state.round != number or state.cohort is None or state.maskers is None:
                raise FederatedError(
                    f"round {number} has masked values and what opens them is gone: {self._book.path} is missing or old"
                )
            keys = {name: _keys(name, state.keys[name]) for name in state.cohort}
            opened = self._sum = MaskedSum(self._cohort_of_round(), keys, state.maskers, names)
            for client, shares in state.revealed.items():  # of before a restart
                opened.add(_revealed(client, shares))
            self._book.write("survivors", None, names)
            self._settled.notify_all()
            self._revealed.wait_for(lambda: self._closed or not opened.missing(), self._settings.step_timeout_s)
            if not opened.missing():
                with contextlib.suppress(FederatedError):  # some part is wrong: others may still come
                    return opened.open()
                self._revealed.wait_for(lambda: self._closed or not opened.silent, self._settings.step_timeout_s)
            return opened.open()

    def _cohort_of_round(self) -> Cohort:
        if self._cohort is None:
            self._cohort = cohort_of(self._settings, self._run, self._book.state.round, self._book.state.cohort or ())
        return self._cohort


class _InvalidMessage(Exception):  # noqa: N818
    """An invalid message of a client, as a sentence without its subject."""


def _is_hex(text: str, size: int) -> bool:
    try:
        return len(text) == 2 * size and len(bytes.fromhex(text)) == size
    except ValueError:
        return False


def _blamed(bad: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Choose the clients to drop if shares could not be decrypted; return each with the reason.

    One client of each pair of reader and sender is dropped. The client in most pairs is dropped first: a malicious one disagrees with
    many, as reader or sender. Of two clients in one pair only, the sender is dropped.
    """
    pairs = {(reader, writer) for reader, writers in bad.items() for writer in writers}
    found = {}
    while pairs:
        quarrels = Counter(name for pair in pairs for name in pair)
        wrote = {writer for _, writer in pairs}
        client = max(quarrels, key=lambda name: (quarrels[name], name in wrote, name))
        others = sorted({*(a for a, b in pairs if b == client), *(b for a, b in pairs if a == client)})
        side = (
            "sent encrypted shares that cannot be opened by"
            if client in wrote
            else "says that it cannot open the encrypted shares of"
        )
        found[client] = f"{side} {', '.join(others[:5])}"
        pairs = {pair for pair in pairs if client not in pair}
    return found


def cohort_of(settings: SecureSum, run: str, number: int, clients: Collection[str]) -> Cohort:
    return Cohort(
        run=run, number=number, clients=tuple(clients), partners=settings.partners, threshold=settings.threshold
    )


def most_clients(federation: Federation) -> int:
    """Return the largest number of clients whose values may be in one sum."""
    return math.ceil((federation.sampling.per_round or federation.clients) * (1 + federation.sampling.over_provision))


def secure_sum_for_clients(federation: Federation, attempt: int) -> dict[str, Any]:
    """Return the secure sum's settings for a round's clients, as JSON values.

    Empty without secure sums.
    """
    if federation.secure is None:
        return {}
    return {"secure": {**former_table(federation.secure), "clients": most_clients(federation), "attempt": attempt}}


def refuse_unmasked_updates(federation: Federation) -> None:
    """Raise FederatedError for secure sums if changes arrive on this machine unmasked."""
    if federation.secure is not None or (federation.noise is not None and federation.noise.by == "clients"):
        raise FederatedError(
            "Flower's own messages carry changes as they are: masks and noise of clients would be made on this machine; "
            'run arclight on the SuperNodes, or set noise.by = "server" and leave secure out'
        )


def _revealed(client: str, shares: dict[str, dict[str, str]]) -> RevealedShares:
    if any(len(part) > 2 * key_agreement.SHARE_BYTES for parts in shares.values() for part in parts.values()):
        raise ValueError(f"a part has at most {key_agreement.SHARE_BYTES} bytes")
    seeds, keys = ({name: int(part, 16) for name, part in shares[what].items()} for what in ("seeds", "keys"))
    return RevealedShares(client=client, seeds=seeds, keys=keys)


def _keys(client: str, keys: dict[str, str]) -> PublicKeys:
    return PublicKeys(client=client, **{name: bytes.fromhex(keys[name]) for name in ("mask", "cipher", "seal")})


class SecureFold(Fold):
    """Average of masked values, which `SecureSumRelay.open` unmasks.

    Nothing is known of single changes, so statistics have norms of the mean only.
    Means are float32, also for float64 weights, which are stepped in float64: masked integers do not show the type of their values.
    opening: called with the clients' names; waits for their shares. held: maps a key and its mean to the mean that counts (with noise,
    `noise.clamp_variance`).
    """

    def __init__(
        self,
        settings: SecureSum,
        clients: int,
        opening: Callable[[list[str]], Unmasking],
        held: Callable[[str, torch.Tensor], torch.Tensor],
        contributions: Iterable[Contribution],
        form: str = "delta",
        *,
        scales: Any = None,
        **more: Any,
    ) -> None:
        given = list(contributions)
        if heavy := [one for one in given if one.weight > settings.max_weight]:
            raise FederatedError(
                f"{heavy[0].client} says that it weighs {heavy[0].weight:,.0f}, and masked its values with no more than "
                f"{settings.max_weight:,} (secure.max_weight)"
            )
        weights = float(sum(int(one.weight) for one in given))
        scale = Scale(rule="mean", shift=fixed_point_shift(settings, clients), total=weights)
        keys = set().union(*(one.tensors for one in given))
        if strangers := uneven(given):
            why = f"{', '.join(strangers)} sent other tensors than the others: their secure sum cannot be opened"
            raise RefusedError("wrong_names", why, strangers)
        super().__init__(given, "delta", **{**more, "scales": dict.fromkeys(keys, scale), "cosines": False})
        self._opened, self._held = opening([one.client for one in given]), held

    def each(self, key: str, workers: ChunkWorkers, into: SinkFactory) -> None:
        sums: torch.Tensor | None = None
        shape: tuple[int, ...] = ()
        for given in self._given:
            masked = given.tensors[key]
            shape = tuple(masked.shape)
            flat = masked.reshape(-1)
            sums = flat.clone() if sums is None else sums.add_(flat)
        assert sums is not None
        self._opened.remove(key, sums)
        mean = self._held(key, mean_of(self.scales[key], sums, torch.float32, shape, workers))
        self._gathered.mean(key, float(torch.linalg.vector_norm(mean, dtype=torch.float64)))
        emit(mean, workers, into)
