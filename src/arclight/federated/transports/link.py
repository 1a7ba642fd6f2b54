"""A node's line to its server, whatever lies between."""

from __future__ import annotations

import threading
from typing import Protocol

from arclight.federated.blobs import BlobStore
from arclight.federated.protocol import Message


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
