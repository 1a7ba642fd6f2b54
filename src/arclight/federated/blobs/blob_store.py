"""Define the `BlobStore` protocol, and check digests and contents.

`FolderStore`, `MirroredStore`, `ObjectStore` and `transports.http_client.HttpBlobStore` are such stores. Codecs and manifests read through the
protocol; nodes and the server keep their own blobs in a `FolderStore`. A new store needs these methods, and must never show half a blob.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from arclight.federated.errors import BlobError


class BlobStore(Protocol):
    """Store immutable files named by their SHA-256.

    Nothing half written or of other content is ever seen under a digest.
    """

    def size(self, digest: str) -> int | None:
        """Return a blob's bytes; None if it is not there (yet)."""

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterable[bytes]:
        """Yield part of a blob, chunk by chunk. Raises BlobError if it is missing."""

    def put(self, digest: str, source: Path | bytes) -> None:
        """Keep a file or bytes; they are in the store when this returns.

        Whether it resumes an earlier attempt, and whether a power failure may lose it, is for the store to say.

        Raises BlobError if the content is not what ``digest`` says, OSError (ENOSPC) if there is no room.
        """

    def file(self, digest: str) -> Path:
        """Return a local, complete file that was verified when it came. Raises BlobError.

        It is fetched first if need be.
        """

    def forget(self, digest: str) -> None:
        """Free a local copy of a blob that stays elsewhere; do nothing if there is none."""

    def remove(self, digest: str) -> None:
        """Remove a blob; nothing happens if it is not there."""


CHUNK_BYTES = 1 << 20
"""Bytes that are read and written at once."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """Return ``digest`` itself. Raises BlobError if it is no SHA-256 in lower-case hexadecimal.

    It may become part of a path.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BlobError(f"a blob is named by its SHA-256, 64 digits of 0-9 and a-f, got {str(digest)[:100]!r}")
    return digest


def missing_blob(digest: str, where: Path | str) -> BlobError:
    return BlobError(f"blob {digest[:12]} is not in {where}: it was never put there, or has been removed since")


def wrong_content(digest: str, found: str, size: int) -> BlobError:
    return BlobError(
        f"what came as blob {digest[:12]} is {found[:12]} ({size} bytes): it was damaged or changed on its way, or named wrongly"
    )


def read_chunks(path: Path, offset: int = 0, length: int | None = None, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield a file's bytes from ``offset`` on, ``length`` or all, up to ``size`` at once.

    Raises BlobError if it ends before.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left = length
        while left is None or left > 0:
            chunk = file.read(size if left is None else min(size, left))
            if not chunk:
                if left is None:
                    return
                raise BlobError(f"{path} ends {left} bytes before the part that was asked for does")
            left = None if left is None else left - len(chunk)
            yield chunk
