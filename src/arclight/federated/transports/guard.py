"""Which node a request comes from, and whether it may say what it says."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import replace

from arclight.federated.errors import FederatedError, ProtocolError, SessionError
from arclight.federated.protocol import Join, Message, Welcome
from arclight.federated.transports.keys import Registry, is_signed

log = logging.getLogger(__name__)

_GOOD_FOR = 60.0
_MOST = 100_000


class Guard:
    """Sessions of nodes that joined, and challenges for those that want to.

    registry: nodes that may join, proving that they have the key; None lets anyone join.
    """

    def __init__(self, registry: Registry | None) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._nodes: dict[str, str] = {}
        """Session to node."""
        self._sessions: dict[str, str] = {}
        """Node to its newest session; an older one counts no more."""
        self._challenges: dict[str, float] = {}
        """Not yet used, with the time until which they are good; oldest first."""

    def challenge(self) -> str:
        """A text that whoever joins next may sign, once and within a minute."""
        now, made = time.monotonic(), secrets.token_urlsafe(32)
        with self._lock:
            while self._challenges and (len(self._challenges) >= _MOST or next(iter(self._challenges.values())) < now):
                del self._challenges[next(iter(self._challenges))]
            self._challenges[made] = now + _GOOD_FOR
        return made

    def check(self, message: Message, token: str, challenge: str) -> None:
        """Raise SessionError for a session that is not known, ProtocolError where a node may not say this."""
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

    def node_of(self, token: str) -> str:
        """Whose session it is. Raises SessionError."""
        with self._lock:
            node = self._nodes.get(token)
        if node is None:
            raise SessionError(
                "the server does not know this session (it was started anew, or the node joined again): join again"
            )
        return node

    def joined(self, join: Join, answer: Message) -> None:
        """From now on the session of ``answer`` is the node's, if it is a welcome."""
        if not isinstance(answer, Welcome):
            return
        with self._lock:
            former = self._sessions.pop(join.node, None)
            self._nodes.pop(former or "", None)
            self._sessions[join.node] = answer.session
            self._nodes[answer.session] = join.node
            while len(self._sessions) > _MOST:
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
        with self._lock:
            good_until = self._challenges.pop(challenge, 0.0)
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
        if good_until < time.monotonic():
            raise ProtocolError(
                "the challenge was not this server's, was used before, or is too old: ask for a new one"
            )
        if not is_signed(signed_text(join, challenge), join.signature, known.key):
            raise ProtocolError(f"the signature is not that of {join.node!r}'s key over this message and challenge")
        if known.clients and not (join.clients and known.clients.issuperset(join.clients)):
            raise ProtocolError(
                f"{join.node!r} is registered for {', '.join(sorted(known.clients))}, not for "
                f"{', '.join(sorted(set(join.clients) - known.clients)) or 'any client'}: say which of them it has (--client)"
            )


def signed_text(join: Join, challenge: str) -> bytes:
    """What a node signs: the challenge and all of its message."""
    return f"arclight federated join\n{challenge}\n{replace(join, signature='').to_json()}".encode()
