"""A folder whose blobs also lie at an address, where nodes put and get theirs without the server's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arclight.checkpoint.files import HashedFile
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import ObjectStore


class MirroredStore(FolderStore):
    """As `FolderStore`: what is put here is put there, what is only there is fetched, what is removed here is removed there.

    Iterating gives the blobs that are here. Besides what a folder raises, LinkError where the address cannot be reached.
    """

    def __init__(self, folder: str | Path, address: str) -> None:
        super().__init__(folder)
        self._there = ObjectStore(address, FolderStore(folder))

    def size(self, digest: str) -> int | None:
        here = super().size(digest)
        return self._there.size(digest) if here is None else here

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        self.file(digest)
        return super().read(digest, offset, length)

    def file(self, digest: str) -> Path:
        return self._there.file(digest)

    def put(self, digest: str, source: Path | bytes) -> None:
        self._there.put(digest, source)

    def adopt(self, digest: str, path: Path) -> None:
        if super().size(digest) is None:
            self._link_or_copy(digest, path)
        self._there.put(digest, path)

    @contextmanager
    def create(self, digest: str | None = None) -> Iterator[HashedFile]:
        with super().create(digest) as file:
            yield file
        self._there.put(file.sha256, self.folder / file.sha256)

    def remove(self, digest: str) -> None:
        self._there.remove(digest)
