"""Server and nodes in one process: no bytes are copied, every message is still written and read."""

from __future__ import annotations

from typing import Protocol

from arclight.federated.blobs import BlobStore
from arclight.federated.protocol import Message, read


class Answers(Protocol):
    """A server, as transports see it."""

    @property
    def blobs(self) -> BlobStore:
        """The server's blobs."""

    def answer(self, message: Message) -> Message:
        """The reply to a node's message; may take as long as an `Ask` allows. Called from any thread."""


class InProcess:
    """A link to a server in this process."""

    def __init__(self, server: Answers) -> None:
        self._server, self.blobs = server, server.blobs

    def send(self, message: Message) -> Message:
        return read(self._server.answer(read(message.to_json())).to_json())

    def close(self) -> None:
        pass
