"""Define the errors of a federation, one class for each way to react to one.

All of ``federated`` raises these, ``arclight federate`` shows them. Callers choose by class whether to retry, to join again or to give up: a
new class needs a reaction of its own. `Reason` travels in messages and is kept in journals: its values stay.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "stale", "duplicate", "unknown_client", "wrong_names", "wrong_shape", "not_finite", "too_large", "damaged", "weight", "version", "session"
]  # fmt: skip

OBSERVED = {"observed": True}
"""``extra`` of a line in the log that says what observers of the run learn by a record, a command or an error: it is not shown twice."""


class FederatedError(RuntimeError):
    """Base of a federation's errors, raised itself if a run cannot continue.

    It says why and what to do.
    """


class SettingsError(FederatedError):
    """Settings of a federation that do not fit the model: a resumed run would raise it again."""


class ProtocolError(FederatedError):
    """A message that is malformed, of another version, or not allowed now."""


class SessionError(ProtocolError):
    """Error of an unknown session: the node joins again, and keeps what it has."""


class BlobError(FederatedError):
    """A blob is missing, incomplete, or has another digest."""


class RefusedError(FederatedError):
    """Error of a refused update or upload; ``reason`` is for programs, the message for people.

    clients: whose updates these are, if the error is raised where several are together, as in a fold.
    """

    def __init__(self, reason: Reason, message: str, clients: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.clients = clients


class UnopenedError(FederatedError):
    """A secure sum lacks too many shares to be unmasked; another one may be started."""


class LinkError(FederatedError):
    """Error of a peer that was not reached in time; the message is kept to send it again."""


class UntrustedError(LinkError):
    """The peer did not prove to be the server; a retry would not help."""


class CancelledError(FederatedError):
    """Work was cancelled: it is no longer wanted, or out of time."""


class ClientError(FederatedError):
    """Failure of a client's training or evaluation, in words for the server.

    ``retryable``: whether another attempt may succeed.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
