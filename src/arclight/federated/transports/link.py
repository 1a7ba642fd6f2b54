"""Define the `Link` protocol of a node to its server, and the link within one process.

`node`, `reporter` and `session` reach the server through a `Link`: `HttpLink`, or `InProcessLink` here. A link ends at a `ServerApi`, which
`server.service` implements (``arclight federate`` wraps both to show progress). Another transport needs these methods and nothing else.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol

from arclight.federated.blobs import BlobStore
from arclight.federated.protocol import Message, read


class Link(Protocol):
    """Send a node's messages, and give access to the server's blobs."""

    @property
    def blobs(self) -> BlobStore:
        """Return the server's blobs; where they are may change when the node joins."""

    def send(self, message: Message) -> Message:
        """Return the server's answer.

        Attempts are repeated until a deadline, so messages may arrive twice.

        Raises LinkError if the server cannot be reached, ProtocolError if it refuses the message as such.
        """

    def cancel_on(self, stopping: threading.Event) -> None:
        """Stop retrying once the event is set.

        Requests that do not get through raise LinkError at once.
        """

    def close(self) -> None:
        """Release connections."""


class ServerApi(Protocol):
    """The server, as transports see it."""

    @property
    def blobs(self) -> BlobStore:
        """Return the server's blobs."""

    @property
    def run(self) -> str:
        """Return the identity of the run that is served, as nodes know it."""

    @property
    def largest_message(self) -> int:
        """Return the bytes of the largest message that a node of this run may have to send."""

    def answer(self, message: Message) -> Message:
        """Answer a node's message, within the time of a `WorkRequest`; called from any thread."""

    def reserve_upload(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        """Reserve room while a node puts a blob, or a part of it.

        Raises RefusedError if none of its updates needs as much.
        """


class InProcessLink:
    """Link to a server in this process.

    Blobs are not copied, messages are still written and read.
    """

    def __init__(self, server: ServerApi) -> None:
        self._server, self.blobs = server, server.blobs

    def send(self, message: Message) -> Message:
        return read(self._server.answer(read(message.to_json())).to_json())

    def cancel_on(self, stopping: threading.Event) -> None:
        pass

    def close(self) -> None:
        pass
