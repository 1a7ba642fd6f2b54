"""Authenticate nodes: which node a request comes from, and whether it may send that message.

`http_server` checks each request but that for a challenge by an `Authenticator`; `http_client` signs `signed_text` with the node's key. The
signed text is part of the protocol: nodes of the same protocol version must produce the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
import threading
import time
from dataclasses import replace

from arclight.fabric.signing import is_signed
from arclight.federated.errors import FederatedError, ProtocolError, SessionError
from arclight.federated.protocol import Join, Message, SecureSumRequest, Welcome, keys_text
from arclight.federated.transports.keys import Registry

log = logging.getLogger(__name__)

_CHALLENGE_LIFETIME_S = 60.0
_MAX_SESSIONS = 100_000
"""Sessions that are known; the oldest nodes must join again."""
_NONCE_BYTES, _TIME_BYTES = 16, 8
"""Bytes of a challenge, beside its seal."""


class Authenticator:
    """Keep the sessions of nodes that joined, and issue challenges to those that want to.

    registry: nodes that may join, proving that they have the key; None lets anyone join. fingerprint: of the certificate that
    nodes see; empty without TLS. run: the one that is served.
    """

    def __init__(self, registry: Registry | None, fingerprint: str = "", run: str = "") -> None:
        self._registry, self._fingerprint, self.run = registry, fingerprint, run
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}
        """Session to node."""
        self._sessions: dict[str, str] = {}
        """Node to its newest session; an older one counts no more."""
        self._seal = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        """Challenges with which registered nodes have joined, with the time until which they are good; oldest first."""

    def challenge(self) -> str:
        """Make a text that a joining node signs, once and within a minute.

        The server keeps nothing of it, so anyone may ask for any number.
        """
        until = int(1000 * (time.monotonic() + _CHALLENGE_LIFETIME_S)).to_bytes(_TIME_BYTES, "big")
        return self._sealed(secrets.token_bytes(_NONCE_BYTES) + until)

    def _sealed(self, body: bytes) -> str:
        return base64.urlsafe_b64encode(body + hmac.digest(self._seal, body, hashlib.sha256)).decode()

    def _good_until(self, challenge: str) -> float:
        """Return the time until which a challenge is good.

        Long ago for one that is not this server's.
        """
        try:
            body = base64.urlsafe_b64decode(challenge)[: _NONCE_BYTES + _TIME_BYTES]
        except ValueError:
            return 0.0
        own = hmac.compare_digest(self._sealed(body).encode(), challenge.encode())
        return int.from_bytes(body[_NONCE_BYTES:], "big") / 1000 if own else 0.0

    def _use(self, challenge: str, until: float) -> bool:
        """Use a challenge up; return True if it was not yet."""
        now = time.monotonic()
        with self._lock:
            while self._used and next(iter(self._used.values())) < now:
                del self._used[next(iter(self._used))]
            fresh = challenge not in self._used
            self._used.setdefault(challenge, until)
        return fresh

    def check(self, message: Message, token: str, challenge: str) -> None:
        """Check session and sender.

        Raises SessionError for an unknown session, ProtocolError for a message that the node may not send.
        """
        if isinstance(message, Join):
            self._check_join(message, challenge)
            return
        node, session = getattr(message, "node", None), getattr(message, "session", None)
        if node is None or session is None:
            raise ProtocolError(f"nodes do not send {message.kind!r}")
        if self.node_of(token) != node:
            raise ProtocolError(f"this session is not {node}'s: a node speaks for itself, in the session it was given")
        if session != token:  # said by one thread of a node while another was joining
            raise SessionError(f"this session of {node} is not its newest: say it again in that")
        if isinstance(message, SecureSumRequest) and message.keys is not None and self._registry is not None:
            text = keys_text(self.run, message.round, message.attempt, message.client, message.keys)
            if not self._registry.vouches(message.node, message.client, text, message.keys.get("signature", "")):
                raise ProtocolError(
                    f"the keys of client {message.client} are not signed by the key of {message.node!r}, or that is not registered for "
                    "this client, and others would not mask with it: join with --key, or give `Node` the `Identity` of that key"
                )

    def node_of(self, token: str) -> str:
        """Return the node of a session. Raises SessionError."""
        with self._lock:
            node = self._nodes.get(token)
        if node is None:
            raise SessionError(
                "the server does not know this session (it was restarted, or the node joined again): join again"
            )
        return node

    def joined(self, join: Join, answer: Message) -> None:
        """Make the session of ``answer`` the node's, if it is a Welcome."""
        if not isinstance(answer, Welcome):
            return
        with self._lock:
            former = self._sessions.pop(join.node, None)
            self._nodes.pop(former or "", None)
            self._sessions[join.node] = answer.session
            self._nodes[answer.session] = join.node
            while len(self._sessions) > _MAX_SESSIONS:
                self._nodes.pop(self._sessions.pop(next(iter(self._sessions))), None)

    def _check_join(self, join: Join, challenge: str) -> None:
        if self._registry is None:
            return
        try:
            known = self._registry.nodes().get(join.node)
        except FederatedError as error:  # in words for those who look after the server, not for whoever asks
            log.error("nobody can join: %s", error)
            raise ProtocolError(
                "the server cannot use its file of nodes, and has said why in its log: have it put right, then join again"
            ) from error
        if known is None:
            raise ProtocolError(
                f"{join.node!r} is not registered with this server: add the line that `arclight federate keys node` printed to "
                f"its file of nodes ({self._registry.path.name})"
            )
        if not join.key:
            raise ProtocolError(f"this server knows its nodes by their keys: join with that of {join.node!r} (--key)")
        if join.key != known.key:
            raise ProtocolError(
                f"{join.node!r} is registered here with another key: use that one, or register this one"
            )
        self._check_audience(join)
        good_until = self._good_until(challenge)
        if good_until < time.monotonic():
            raise ProtocolError("the challenge was not this server's, or is too old: ask for a new one")
        if not is_signed(signed_text(join, challenge), join.signature, known.key):
            raise ProtocolError(f"the signature is not that of {join.node!r}'s key over this message and challenge")
        if not self._use(challenge, good_until):
            raise ProtocolError("the challenge was used before: ask for a new one")
        if known.clients and not (join.clients and known.clients.issuperset(join.clients)):
            raise ProtocolError(
                f"{join.node!r} is registered for {', '.join(sorted(known.clients))}, not for "
                f"{', '.join(sorted(set(join.clients) - known.clients)) or 'any client'}: say which of them it has (--client)"
            )

    def _check_audience(self, join: Join) -> None:
        """Raise ProtocolError for a message made for another server, or another run of this one."""
        if join.server != self._fingerprint:
            seen = f"that shows the certificate of fingerprint {join.server}" if join.server else "without TLS"
            raise ProtocolError(
                f"{join.node!r} joins a server {seen}, and this one has {self._fingerprint or 'no certificate'}: somebody is in "
                "between, or the server has got a new certificate since; join again"
            )
        if join.run != self.run:
            raise ProtocolError(
                f"{join.node!r} joins run {join.run!r}, and this server is at run {self.run!r}: join again, to sign for that"
            )


def signed_text(join: Join, challenge: str) -> bytes:
    """Return the text that a node signs: the challenge and all of its message.

    The message names server and run.
    """
    return f"arclight federated join\n{challenge}\n{replace(join, signature='').to_json()}".encode()
