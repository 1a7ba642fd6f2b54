"""A node's line to its server, whatever lies between."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Protocol

from arclight.federated.blobs import BlobStore
from arclight.federated.protocol import Message, read


class Link(Protocol):
    """Where a node sends its messages, and gets and puts blobs."""

    @property
    def blobs(self) -> BlobStore:
        """The server's blobs, as they are seen from here; where they are may change when the node joins."""

    def send(self, message: Message) -> Message:
        """The server's answer. Attempts are repeated until a deadline, so messages may arrive twice.

        Raises LinkError where the server cannot be reached, ProtocolError where it refuses the message as such.
        """

    def heed(self, stopping: threading.Event) -> None:
        """Once this is set, nothing is repeated: what does not get through raises LinkError at once."""

    def close(self) -> None:
        """Give back connections."""


class ServerApi(Protocol):
    """A server, as transports see it."""

    @property
    def blobs(self) -> BlobStore:
        """The server's blobs."""

    @property
    def run(self) -> str:
        """The run that is served, as nodes know it."""

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that a node of this run may have to send."""

    def answer(self, message: Message) -> Message:
        """The reply to a node's message; may take as long as an `Ask` allows. Called from any thread."""

    def taking(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        """While a node puts a blob, or a part of it. Raises RefusedError where none of its updates needs as much."""


class InProcessLink:
    """A link to a server in this process."""

    def __init__(self, server: ServerApi) -> None:
        self._server, self.blobs = server, server.blobs

    def send(self, message: Message) -> Message:
        return read(self._server.answer(read(message.to_json())).to_json())

    def heed(self, stopping: threading.Event) -> None:
        pass

    def close(self) -> None:
        pass
