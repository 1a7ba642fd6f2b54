"""Run a client's part in a secure sum, so that its update leaves the node only masked.

`reporter` makes a `SecureSumClient` for each update of a secure run, and ``arclight federate join`` and the Flower app the node's `Identity`; the
server's side is ``server.secure_sums``. A secret is used for one sum only: keep that in any change.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from arclight._intervals import todays_name
from arclight.checkpoint.tensorfile import DTYPES
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import open_manifest, write_blobs
from arclight.federated.clients.session import ClosedError
from arclight.federated.codecs.encoding import decode
from arclight.federated.errors import ClientError, FederatedError, ProtocolError
from arclight.federated.privacy.key_agreement import Cohort, PublicKeys
from arclight.federated.privacy.secure_aggregation import Participant, fixed_point_shift, fixed_point_terms
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import (
    Close,
    Fit,
    Manifest,
    Message,
    SecureSumReply,
    SecureSumRequest,
    Update,
    keys_text,
)

_POLL_S = 1.0
"""Seconds between messages to a server that holds no answers back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Sign a node's clients' keys, and verify others'."""

    sign: Callable[[bytes], str] | None = None
    """Signs a text with the node's key; None if it has none."""
    vouches: Callable[[str, str, bytes, str], bool] | None = None
    """Returns whether a node may act for a client and has signed a text (`Registry.vouches`). None: the server is trusted."""


class SecureSumClient:
    """One client in one secure sum.

    send: sends a message made for the session of the moment. order: the order that asked for the sum.

    hold_s: seconds for which the server may hold an answer.
    """

    def __init__(
        self,
        node: str,
        order: Fit,
        send: Callable[[Callable[[str], Message]], Message],
        stopping: threading.Event,
        hold_s: float = 20.0,
        identity: Identity | None = None,
    ) -> None:
        settings = dict(order.privacy["secure"])
        self._clients, self._attempt = int(settings.pop("clients")), int(settings.pop("attempt"))
        self._settings = SecureSum(**{todays_name(SecureSum, name): value for name, value in settings.items()})
        self._node, self._order, self._send, self._stopping, self._hold_s = node, order, send, stopping, hold_s
        self._identity = identity or Identity()
        self._me = Participant(order.client)

    def masked(self, update: Update, blobs: FolderStore, into: Path) -> Update:
        """Return the update with its values masked, their blobs below ``into``.

        Raises ClientError if the others do not come.
        """
        mine = self._me.keys
        own = {"mask": mine.mask.hex(), "cipher": mine.cipher.hex(), "seal": mine.seal.hex()}
        if self._identity.sign is not None:
            own["signature"] = self._identity.sign(self._text(self._order.client, own))
        reply = self._until("cohort", "the other clients' keys", keys=own)
        cohort = Cohort(
            run=self._order.run,
            number=self._order.round,
            clients=reply.cohort or (),
            partners=self._settings.partners,
            threshold=self._settings.threshold,
        )
        keys = {name: self._keys(name, sent) for name, sent in reply.keys.items()}
        encrypted_shares = {name: text.hex() for name, text in self._me.share(cohort, keys).items()}
        reply = self._until(
            "encrypted_shares", "the other clients' encrypted shares", encrypted_shares=encrypted_shares
        )
        received = {name: bytes.fromhex(text) for name, text in (reply.encrypted_shares or {}).items()}
        reply = self._until(
            "maskers", "the other clients to read their encrypted shares", unreadable=self._me.unreadable(received)
        )
        received = {name: text for name, text in received.items() if name in (reply.maskers or ())}
        values = _Terms(
            update, blobs, self._weight(update), fixed_point_shift(self._settings, self._clients), self._settings
        )
        masked = self._mask(received, values)
        shapes = {key: update.manifest.tensors[key].shape for key in values}
        manifest: Manifest = write_blobs(
            ((key, sums.view(shapes[key])) for key, sums in masked),
            FolderStore(into),
            kind="update",
            base=update.manifest.base,
        )
        cut = sum(values.cut.values())
        metrics = {**update.metrics, "privacy/cut": float(cut)}
        return dataclasses.replace(update, manifest=manifest, metrics=metrics, attempt=self._attempt)

    def _mask(
        self, received: Mapping[str, bytes], values: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            return self._me.mask(received, values)
        except FederatedError as error:  # this sum has lost too many; another one may keep them
            raise ClientError(str(error), retryable=True) from error

    def _text(self, client: str, keys: Mapping[str, str]) -> bytes:
        return keys_text(self._order.run, self._order.round, self._attempt, client, keys)

    def _keys(self, client: str, keys: Mapping[str, str]) -> PublicKeys:
        """Read a client's keys as the server passes them on.

        Raises ClientError if its node has not signed them.
        """
        vouches, node = self._identity.vouches, keys.get("node", "")
        if vouches is not None and not vouches(node, client, self._text(client, keys), keys.get("signature", "")):
            raise ClientError(
                f"the keys of client {client} that the server has passed on are not signed by a node that may speak for it "
                f"({node!r} is said to have given them): nothing is sent. Either the file of nodes here is old, or the server or "
                "somebody behind it wants to read what is masked"
            )
        return PublicKeys(client=client, **{what: bytes.fromhex(keys[what]) for what in ("mask", "cipher", "seal")})

    def reveal(self) -> None:
        """Wait until the server names the survivors, and send this client's shares of their secrets."""
        reply = self._until("survivors", "the round to be closed", timeouts=None)
        if reply.survivors is None or reply.finished:
            return
        parts = self._me.reveal(reply.survivors)
        self._exchange(
            seed_shares={name: f"{part:x}" for name, part in parts.seeds.items()},
            key_shares={name: f"{part:x}" for name, part in parts.keys.items()},
        )

    def _weight(self, update: Update) -> int:
        by, most = self._order.weigh_by, self._settings.max_weight
        whole = {"samples": update.samples, "tokens": update.tokens, "equal": 1}[by]
        if whole > most:
            raise ClientError(
                f"{update.client} has {whole:,} {by} in round {update.round}, and a secure sum weighs up to {most:,}: raise "
                'secure.max_weight, or set weigh_by = "equal"'
            )
        return whole

    def _until(
        self,
        settled: Literal["cohort", "encrypted_shares", "maskers", "survivors"],
        what: str,
        timeouts: float | None = 3.0,
        **fields: Any,
    ) -> SecureSumReply:
        """Send, and poll until the server has settled the stage ``settled``.

        timeouts: how many of the settings' `step_timeout_s` to wait; None waits for ever, and then the round may be over without it.
        """
        until = None if timeouts is None else time.monotonic() + timeouts * self._settings.step_timeout_s
        while True:
            began = time.monotonic()
            reply = self._exchange(waits_for=settled, hold_s=self._hold_s, **fields)
            if reply.finished and timeouts is not None:
                why = f"the secure sum of round {self._order.round} continues without {self._order.client}"
                raise ClientError(why, retryable=True)
            if reply.finished or getattr(reply, settled) is not None:
                return reply
            if self._stopping.wait(max(0.0, min(_POLL_S, self._hold_s) - (time.monotonic() - began))):
                raise ClosedError("the node was told to stop")
            if until is not None and time.monotonic() > until:
                why = f"{self._order.client} has waited for {what} in round {self._order.round} in vain"
                raise ClientError(why, retryable=True)
            fields = {}

    def _exchange(self, **fields: Any) -> SecureSumReply:
        answer = self._send(
            lambda session: SecureSumRequest(
                node=self._node,
                session=session,
                client=self._order.client,
                round=self._order.round,
                attempt=self._attempt,
                **fields,
            )
        )
        if isinstance(answer, Close):
            raise ClosedError(answer.reason)
        if not isinstance(answer, SecureSumReply):
            raise ProtocolError(f"the server answered {answer.kind!r} to a client of a secure sum")
        return answer


class _Terms(Mapping[str, torch.Tensor]):
    """Make a client's fixed-point terms by key when they are asked for. Integers are not sent."""

    def __init__(self, update: Update, blobs: FolderStore, weight: int, shift: int, settings: SecureSum) -> None:
        self._opened, self._how = open_manifest(update.manifest, blobs), (weight, shift, settings)
        self.cut: dict[str, int] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        made, self.cut[key] = fixed_point_terms(decode(key, self._opened[key]), *self._how)
        return made

    def __iter__(self) -> Iterator[str]:
        return (key for key, entry in self._opened.manifest.tensors.items() if DTYPES[entry.dtype].is_floating_point)

    def __len__(self) -> int:
        return sum(1 for _ in self)
