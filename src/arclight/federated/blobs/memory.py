"""Blobs in memory, for federations within one process and for tests."""

from __future__ import annotations

import hashlib
import io
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arclight.checkpoint.files import HashedFile
from arclight.federated.blobs.blob_store import PIECE_BYTES, check_digest, missing_blob, wrong_content
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import BlobError


class MemoryStore:
    """Blobs that end with the process. Those that are asked for as files are written to a temporary folder."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._blobs))

    def size(self, digest: str) -> int | None:
        found = self._blobs.get(check_digest(digest))
        return None if found is None else len(found)

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        whole = memoryview(self._found(digest))
        if offset + (length or 0) > len(whole):
            raise BlobError(
                f"blob {digest[:12]} has {len(whole)} bytes, which is less than byte {offset} and {length} more"
            )
        part = whole[offset : None if length is None else offset + length]
        return (bytes(part[start : start + PIECE_BYTES]) for start in range(0, len(part), PIECE_BYTES))

    def put(self, digest: str, source: Path | bytes) -> None:
        content = source if isinstance(source, bytes) else source.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != check_digest(digest):
            raise wrong_content(digest, found, len(content))
        self._blobs.setdefault(digest, content)

    @contextmanager
    def create(self, digest: str | None = None) -> Iterator[HashedFile]:
        """As `FolderStore.create`."""
        content = io.BytesIO()
        writer = HashedFile(content)
        yield writer
        if digest not in (None, writer.sha256):
            raise wrong_content(check_digest(str(digest)), writer.sha256, writer.bytes)
        self._blobs.setdefault(writer.sha256, content.getvalue())

    def file(self, digest: str) -> Path:
        content = self._found(digest)
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="arclight-blobs-")
        store = FolderStore(self._folder.name)
        store.put(digest, content)
        return store.file(digest)

    def forget(self, digest: str) -> None:
        """Nothing: what is here was put here."""
        check_digest(digest)

    def remove(self, digest: str) -> None:
        self._blobs.pop(check_digest(digest), None)
        if self._folder is not None:
            FolderStore(self._folder.name).remove(digest)

    def _found(self, digest: str) -> bytes:
        try:
            return self._blobs[check_digest(digest)]
        except KeyError:
            raise missing_blob(digest, "memory") from None
