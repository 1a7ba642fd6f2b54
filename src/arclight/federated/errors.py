"""Errors of a federation, one class for each way to react to one."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "stale", "duplicate", "unknown_client", "wrong_names", "wrong_shape", "not_finite", "too_large", "damaged", "weight", "version", "session"
]  # fmt: skip


class FederatedError(RuntimeError):
    """A federated run that cannot go on as it was asked to; the message says why and what to do."""


class SettingsError(FederatedError):
    """Settings of a federation that do not fit the model: a resumed run would raise it again."""


class ProtocolError(FederatedError):
    """A message that is malformed, of another version, or not allowed now."""


class SessionError(ProtocolError):
    """The session is unknown: the node joins again, and what it holds is good."""


class BlobError(FederatedError):
    """A blob is missing, incomplete, or has another digest."""


class RefusedError(FederatedError):
    """An update is refused; ``reason`` tells programs what the message tells people.

    clients: whose updates these are, if the error is raised where several are together, as in a fold.
    """

    def __init__(self, reason: Reason, message: str, clients: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.clients = clients


class UnopenedError(FederatedError):
    """A secure sum lacks too many shares to be unmasked; another one may be started."""


class LinkError(FederatedError):
    """The peer was not reached before the deadline; what was to be sent is kept."""


class UntrustedError(LinkError):
    """The peer did not prove to be the server; a retry would not help."""


class CancelledError(FederatedError):
    """Work was cancelled: it is no longer wanted, or out of time."""


class ClientError(FederatedError):
    """A client's training or measuring failed, in words for the server; ``retryable``: whether another attempt may do better."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
