"""What every place for blobs can do, be it memory, a folder, an object store or the other end of a connection."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from arclight.federated.errors import BlobError


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


PIECE_BYTES = 1 << 20
"""Bytes that are read and written at once."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """``digest`` itself. Raises BlobError for what is no SHA-256 in lower-case hexadecimal: it may become part of a path."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BlobError(f"a blob is named by its SHA-256, 64 digits of 0-9 and a-f, got {str(digest)[:100]!r}")
    return digest


def missing_blob(digest: str, where: Path | str) -> BlobError:
    return BlobError(f"blob {digest[:12]} is not in {where}: it was never put there, or has been removed since")


def wrong_content(digest: str, found: str, size: int) -> BlobError:
    return BlobError(
        f"what came as blob {digest[:12]} is {found[:12]} ({size} bytes): it was damaged or changed on its way, or named wrongly"
    )


def read_pieces(path: Path, offset: int = 0, length: int | None = None, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a file from ``offset`` on, ``length`` of them or all, up to ``size`` at once. Raises BlobError where it ends before."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left = length
        while left is None or left > 0:
            piece = file.read(size if left is None else min(size, left))
            if not piece:
                if left is None:
                    return
                raise BlobError(f"{path} ends {left} bytes before the part that was asked for does")
            left = None if left is None else left - len(piece)
            yield piece
