"""Names of blobs, and checks of what is said to be under them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from arclight.federated.errors import BlobError

PIECE = 1 << 20
"""Bytes that are read and written at once."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def checked(digest: str) -> str:
    """``digest`` itself. Raises BlobError for what is no SHA-256 in lower-case hexadecimal: it may become part of a path."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BlobError(f"a blob is named by its SHA-256, 64 digits of 0-9 and a-f, got {str(digest)[:100]!r}")
    return digest


def missing(digest: str, where: Path | str) -> BlobError:
    return BlobError(f"blob {digest[:12]} is not in {where}: it was never put there, or has been removed since")


def not_it(digest: str, found: str, size: int) -> BlobError:
    return BlobError(
        f"what came as blob {digest[:12]} is {found[:12]} ({size} bytes): it was damaged or changed on its way, or named wrongly"
    )


def pieces_of(path: Path, offset: int = 0, length: int | None = None, size: int = PIECE) -> Iterator[bytes]:
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
