"""What every place for blobs can do, be it memory, a folder, an object store or the other end of a connection."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class BlobStore(Protocol):
    """Immutable files named by their SHA-256. Nothing half written or of other content is ever seen under a digest."""

    def size(self, digest: str) -> int | None:
        """Bytes of a blob; None where it is not there (yet)."""

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterable[bytes]:
        """Part of a blob, piece by piece. Raises BlobError where it is missing."""

    def put(self, digest: str, source: Path | bytes) -> None:
        """Keep a file or bytes, durably when this returns. Going on with what an earlier attempt left is the store's business.

        Raises BlobError where the content is not what ``digest`` says, OSError (ENOSPC) where there is no room.
        """

    def file(self, digest: str) -> Path:
        """A local, complete and verified file with the blob's content, fetched first where need be. Raises BlobError."""

    def forget(self, digest: str) -> None:
        """Give back the room of a copy that lies here beside the blob itself elsewhere, which stays; nothing where there is none."""

    def remove(self, digest: str) -> None:
        """Forget a blob; nothing happens where it is not there."""
