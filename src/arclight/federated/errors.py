"""What goes wrong in a federation, by who has to act on it."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "stale", "duplicate", "unknown_client", "wrong_names", "wrong_shape", "not_finite", "too_large", "damaged", "weight", "version", "session"
]  # fmt: skip


class FederatedError(RuntimeError):
    """A federated run that cannot go on as it was asked to; the message says why and what to do."""


class ProtocolError(FederatedError):
    """A message that is malformed, of another version, or not allowed now."""


class SessionError(ProtocolError):
    """The server does not know a node's session (any more): the node joins again, and what it holds is good."""


class BlobError(FederatedError):
    """Bytes that are missing, cut short, or not those that their digest names."""


class RefusedError(FederatedError):
    """An update that the server does not take; ``reason`` tells programs what the message tells people.

    clients: whose updates these are, if the error is raised where several are together, as in a fold.
    """

    def __init__(self, reason: Reason, message: str, clients: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.clients = clients


class UnopenedError(FederatedError):
    """A secure sum of which too much is missing to take its masks away; another one may be opened."""


class LinkError(FederatedError):
    """The other side could not be reached before the deadline; what was to be sent is kept."""


class UntrustedError(LinkError):
    """Who answers did not prove to be the server; trying again soon would not help."""


class CancelledError(FederatedError):
    """Work that is no longer wanted, or that has run out of time, was ended before it was done."""


class ClientError(FederatedError):
    """A client's training or measuring failed, in words for the server; ``again``: whether another attempt may do better."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again
