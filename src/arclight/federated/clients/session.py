"""Keep a node's session with its server: join, rejoin after a loss, retry while it is down.

`node`, `reporter` and, through it, `secure_sum_client` send all messages through one `Session`. The link retries single messages, a lost session
is restored here. A message may arrive twice: the protocol makes that harmless, and must.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.federated.errors import (
    BlobError,
    ClientError,
    FederatedError,
    LinkError,
    ProtocolError,
    SessionError,
    UntrustedError,
)
from arclight.federated.protocol import Close, HeldRound, Join, Leave, Message, Receipt, Wait, Welcome

if TYPE_CHECKING:
    from arclight.federated.transports.link import Link

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 1.0
"""Seconds between attempts to reach a server that is away, beyond those that the link itself makes."""


_TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
"""Errors of the system with which a client may be tried again."""


class ClosedError(FederatedError):
    """The run is over for this node.

    The server has ended it or is at another run, or the node was told to stop.
    """


class Session:
    """Send messages within the node's session.

    has: called whenever the node joins: returns what it has begun and finished, and its steps per second. retry_timeout_s: how long a
    server that cannot be reached, or does not let the node in, is tried again before LinkError is raised.
    """

    def __init__(
        self,
        link: Link,
        node: str,
        clients: tuple[str, ...],
        has: Callable[[], tuple[list[HeldRound], float | None]],
        retry_timeout_s: float,
        stopping: threading.Event,
    ) -> None:
        self._link, self.node, self._clients, self._has, self._retry_timeout_s = (
            link,
            node,
            clients,
            has,
            retry_timeout_s,
        )
        self._process = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._welcome: Welcome | None = None
        self._stopping = stopping
        self.moved = False
        """Whether the server has begun another run meanwhile, which the node can join when it starts again."""
        self.failed = False
        """Whether the server has ended it because the run could not go on, or has no place for the node."""

    @property
    def welcome(self) -> Welcome:
        if self._welcome is None:
            raise FederatedError("the node has not joined yet")
        return self._welcome

    def join(self, lost: str | None = None) -> Welcome:
        """Join; again if the session ``lost`` is still the newest one.

        Raises ClosedError if there is nothing to join.
        """
        with self._lock:
            if self._welcome is not None and self._welcome.session != lost:
                return self._welcome
            until = time.monotonic() + self._retry_timeout_s
            while True:
                answer = self._request(self._join, until)
                match answer:
                    case Welcome():
                        former, self._welcome = self._welcome, answer
                        if former is not None and former.run != answer.run:
                            self.moved = True
                            raise ClosedError(f"the server is at another run now, {answer.run}, not at {former.run}")
                        log.info(
                            "node %s has joined run %s for %s",
                            self.node,
                            answer.run,
                            ", ".join(self._clients) or "any client",
                        )
                        return answer
                    case Close():
                        raise self.closed(answer)
                    case Wait():
                        log.info("node %s waits to join: %s", self.node, answer.waiting_for)
                        self._pause(
                            answer.retry_after_s,
                            until,
                            f"the server does not let node {self.node} in: {answer.waiting_for}",
                        )
                    case Receipt():
                        raise ProtocolError(f"the server does not take node {self.node}: {answer.message}")
                    case _:
                        raise ProtocolError(f"the server answered {answer.kind!r} to a join")

    def send(self, make: Callable[[str], Message]) -> Message:
        """Send ``make(session)`` and return the reply.

        Join and send again if the session is lost.
        """
        until = time.monotonic() + self._retry_timeout_s
        while True:
            session = self.welcome.session
            try:
                answer = self._request(partial(make, session), until)
            except SessionError as error:
                answer = Receipt(accepted=False, reason="session", message=str(error))
            if not (isinstance(answer, Receipt) and answer.reason == "session"):
                return answer
            log.warning("node %s: %s", self.node, answer.message)
            self._pause(0.0, until, f"the server keeps losing node {self.node}: {answer.message}")
            self.join(lost=session)

    def retry(self, action: Callable[[], None]) -> None:
        """Run a transfer, again if the server is away or has lost the session."""
        until, away = time.monotonic() + self._retry_timeout_s, False
        while True:
            session = self.welcome.session
            try:
                action()
                return
            except SessionError as error:
                self._pause(0.0, until, f"the server keeps losing node {self.node}: {error}")
                self.join(lost=session)
            except LinkError as error:
                self._is_away(error, again=away)
                away = True
                self._pause(_RETRY_PAUSE_S, until, str(error))

    def try_to_send(self, make: Callable[[str], Message]) -> Message | None:
        """Send without waiting for an absent server or a new session; None if it failed."""
        if self._welcome is None:
            return None
        try:
            return self._link.send(make(self._welcome.session))
        except (LinkError, SessionError) as error:
            log.debug("node %s: %s", self.node, error)
            return None

    def closed(self, answer: Close) -> ClosedError:
        """Return the error to raise for a Close."""
        self.failed = answer.failed
        return ClosedError(answer.reason)

    def leave(self) -> None:
        if self._welcome is not None:
            self.try_to_send(lambda session: Leave(node=self.node, session=session))

    def _join(self) -> Join:
        held, speed = self._has()
        return Join(
            node=self.node, clients=self._clients, held=tuple(held), process=self._process, steps_per_second=speed
        )

    def _request(self, make: Callable[[], Message], until: float) -> Message:
        """Send until there is a reply; an absent server is logged once."""
        away = False
        while True:
            try:
                answer = self._link.send(make())
            except LinkError as error:
                if self._welcome is None and isinstance(error, UntrustedError):
                    raise
                self._is_away(error, again=away)
                away = True
                self._pause(_RETRY_PAUSE_S, until, str(error))
            else:
                if away:
                    log.warning("node %s has reached its server", self.node)
                return answer

    def _is_away(self, error: LinkError, *, again: bool) -> None:
        level = logging.INFO if again else logging.WARNING
        log.log(
            level, "node %s cannot reach its server, and tries for %g s: %s", self.node, self._retry_timeout_s, error
        )

    def _pause(self, seconds: float, until: float, about: str) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise LinkError(
                f"{about}; tried for {self._retry_timeout_s:g} s. What the node has finished is kept: start it again later"
            )
        if self._stopping.wait(min(seconds, left)):
            raise ClosedError("the node was told to stop")


def as_client_error(error: BaseException) -> ClientError:
    """Turn an error of a client's own code into one line with its notes."""
    if isinstance(error, ClientError):
        return error
    notes: list[Any] = list(getattr(error, "__notes__", []))
    ours = type(error).__module__.startswith("arclight.")  # they say all in their words
    kind = "" if ours else f"{type(error).__name__}: "
    retryable = isinstance(error, BlobError) or _is_transient(error)
    return ClientError("; ".join([f"{kind}{error}", *map(str, notes)]), retryable=retryable)


def _is_transient(error: BaseException | None) -> bool:
    """Return True if the error is, or was raised from, one of the system that may pass."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _TRANSIENT):
        error = error.__cause__  # a checkpoint that cannot be written says so in its own words
    return error is not None
