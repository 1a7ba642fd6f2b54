"""A round's secure sum on the server: it passes keys and letters on, says whose values have come, and opens their sum.

All that it holds is public or sealed. It is kept in a file, so that a server that is killed after a round was closed can still
open its sum; clients say their parts again when they are asked again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from arclight.fabric.replacing import replace_text
from arclight.federated.aggregation.chunks import Lanes
from arclight.federated.aggregation.fold import Fold, Into, hand_over, mean_of
from arclight.federated.aggregation.scale import Contribution, Scale
from arclight.federated.errors import FederatedError, ProtocolError, UnopenedError
from arclight.federated.privacy.agreement import Circle, Keys
from arclight.federated.privacy.masks import Revealed, Sum, Unmasking, shift_of
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import Secure, Secured
from arclight.federated.settings import Federation


@dataclass
class _State:
    """Of one round, as its file has it."""

    round: int = -1
    attempt: int = 0
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    circle: list[str] | None = None
    letters: dict[str, dict[str, str]] = field(default_factory=dict)
    written: list[str] | None = None
    here: list[str] | None = None
    revealed: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)


class Exchange:
    """The secure sums of a run, one round at a time. ``expected``: clients of a round that have not failed, by its number."""

    def __init__(self, settings: SecureSum, run: str, path: Path, expected: Callable[[int], Collection[str]]) -> None:
        self._settings, self._run, self._path, self._expected = settings, run, path, expected
        self._changed = threading.Condition()
        self._since: dict[str, float] = {}
        self._sum: Sum | None = None
        self._state = _State(**json.loads(path.read_bytes())) if path.exists() else _State()

    def hear(self, message: Secure) -> Secured:
        """Take in what a client says, and tell it what is settled. Raises ProtocolError for what it cannot say now."""
        with self._changed:
            expected = set(self._expected(message.round))
            here, asked = (self._state.round, self._state.attempt), (message.round, message.attempt)
            if asked < here or (asked > here and message.client not in expected):
                return Secured(over=True)
            if asked > here:
                self._state, self._sum = _State(round=message.round, attempt=message.attempt), None
                self._since.clear()
            before = json.dumps(asdict(self._state))
            self._take(message)
            self._settle(expected)
            if (after := json.dumps(asdict(self._state))) != before:
                replace_text(self._path, after)
                self._changed.notify_all()
            return self._told(message.client)

    def _take(self, message: Secure) -> None:
        state, client = self._state, message.client
        if message.keys is not None and state.circle is None:
            state.keys.setdefault(client, dict(message.keys))
        if message.keys is not None and state.keys.get(client, message.keys) != message.keys:
            raise ProtocolError(f"{client} has given other keys for round {state.round}: its node was started again")
        if message.letters is not None and state.written is None:
            if client not in (state.circle or ()):
                raise ProtocolError(f"{client} is not of round {state.round}'s secure sum")
            state.letters.setdefault(client, dict(message.letters))
        if message.seeds is not None and message.parts is not None and client in (state.here or ()):
            told = {"seeds": message.seeds, "keys": message.parts}
            try:
                if self._sum is not None:
                    self._sum.add(_revealed(client, told))
            except (FederatedError, ValueError) as error:
                raise ProtocolError(f"{client} gave parts that cannot be: {error}") from error
            state.revealed.setdefault(client, told)

    def _settle(self, expected: set[str]) -> None:
        state = self._state
        if state.circle is None and len(state.keys) > 1 and self._have(expected, set(state.keys), "keys"):
            state.circle = sorted(state.keys)
        asked = expected & set(state.circle or ())
        if state.circle is not None and state.written is None and self._have(asked, set(state.letters), "letters"):
            state.written = sorted(state.letters)

    def _have(self, all_: set[str], come: set[str], what: str) -> bool:
        """Whether everybody has come, or the first has waited long enough."""
        if not come:
            return False
        since = self._since.setdefault(what, time.monotonic())
        return all_ <= come or time.monotonic() - since > self._settings.patience

    def _told(self, client: str) -> Secured:
        state = self._state
        if state.circle is None:
            return Secured()
        letters = None
        if state.written is not None:
            letters = {name: sent[client] for name, sent in state.letters.items() if client in sent}
        here = None if client in state.revealed else state.here
        left = state.written is not None and client not in state.written
        over = (
            client not in state.circle or left or client in state.revealed or (here is not None and client not in here)
        )
        return Secured(
            circle=tuple(state.circle),
            keys={} if state.written is not None else dict(state.keys),
            letters=letters,
            here=None if here is None else tuple(here),
            over=over,
        )

    def open(self, number: int, here: Iterable[str]) -> Unmasking:
        """What takes the masks away from the sum of these clients' values; waits for their parts.

        Raises UnopenedError where too few are left, or do not give them in time.
        """
        try:
            return self._open(number, here)
        except FederatedError as error:
            raise UnopenedError(str(error)) from error

    def _open(self, number: int, here: Iterable[str]) -> Unmasking:
        with self._changed:
            state, names = self._state, sorted(here)
            if state.round != number or state.circle is None or state.written is None:
                raise FederatedError(
                    f"round {number} has masked values and what opens them is gone: {self._path} is missing or old"
                )
            keys = {name: _keys(name, told) for name, told in state.keys.items()}
            self._sum = Sum(self._circle(), keys, state.written, names)
            for client, told in state.revealed.items():  # of before a restart
                self._sum.add(_revealed(client, told))
            state.here = names
            replace_text(self._path, json.dumps(asdict(state)))
            opened = self._sum
            self._changed.wait_for(lambda: not opened.missing(), self._settings.patience)
            return opened.open()

    def _circle(self) -> Circle:
        return circle_of(self._settings, self._run, self._state.round, self._state.circle or ())


def circle_of(settings: SecureSum, run: str, number: int, clients: Collection[str]) -> Circle:
    return Circle(
        run=run, number=number, clients=tuple(clients), partners=settings.partners, threshold=settings.threshold
    )


def most(federation: Federation) -> int:
    """Clients whose values may be in one sum."""
    return math.ceil((federation.sampling.per_round or federation.clients) * (1 + federation.sampling.over_provision))


def order(federation: Federation, attempt: int) -> dict[str, Any]:
    """What clients are told to do about a round's secure sum, as JSON values; nothing without them."""
    if federation.secure is None:
        return {}
    return {"secure": {**asdict(federation.secure), "clients": most(federation), "attempt": attempt}}


def refuse_in_the_open(federation: Federation) -> None:
    """For clients whose changes come to this machine as they are. Raises FederatedError where they were to be hidden before."""
    if federation.secure is not None or (federation.noise is not None and federation.noise.by == "clients"):
        raise FederatedError(
            "Flower's own messages carry changes as they are: masks and noise of clients would be made on this machine; "
            'run arclight on the SuperNodes, or set noise.by = "server" and leave secure out'
        )


def _revealed(client: str, told: dict[str, dict[str, str]]) -> Revealed:
    seeds, keys = ({name: int(part, 16) for name, part in told[what].items()} for what in ("seeds", "keys"))
    return Revealed(client=client, seeds=seeds, keys=keys)


def _keys(client: str, told: dict[str, str]) -> Keys:
    return Keys(client=client, **{name: bytes.fromhex(told[name]) for name in ("mask", "cipher", "seal")})


class SecureFold(Fold):
    """The mean of masked values, which `Exchange.open` takes the masks from. Nothing is known of single changes.

    held: what is to hold of a key's mean, which is made of it.
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
        weights = float(sum(min(int(one.weight), settings.most_weight) for one in given))
        scale = Scale(rule="mean", shift=shift_of(settings, clients), total=weights)
        keys = set().union(*(one.tensors for one in given))
        if uneven := [one.client for one in given if set(one.tensors) != keys]:
            raise FederatedError(f"{uneven[0]} sent other tensors than the others: their secure sum cannot be opened")
        super().__init__(given, "delta", **{**more, "scales": dict.fromkeys(keys, scale), "cosines": False})
        self._opened, self._held = opening([one.client for one in given]), held

    def each(self, key: str, among: Lanes, into: Into) -> None:
        sums: torch.Tensor | None = None
        shape: tuple[int, ...] = ()
        for given in self._given:
            masked = given.tensors[key]
            shape = tuple(masked.shape)
            flat = masked.reshape(-1)
            sums = flat.clone() if sums is None else sums.add_(flat)
        assert sums is not None
        self._opened.take_away(key, sums)
        mean = self._held(key, mean_of(self.scales[key], sums, torch.float32, shape, among))
        self._gathered.mean(key, float(torch.linalg.vector_norm(mean, dtype=torch.float64)))
        hand_over(mean, among, into)
