"""Store blobs at an address (``s3://bucket/run/blobs``) through fsspec, with a local cache.

With ``federation.blobs_at`` the server's store is a `MirroredStore` (`server_run` makes it), and nodes put and get blobs by an `ObjectStore`
(`HttpLink` makes it when the server names the address). Keys at the address are digests: other versions read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from arclight.checkpoint.files import HashedFile
from arclight.checkpoint.remote import RemotePath, is_remote, to_path
from arclight.federated.blobs.blob_store import CHUNK_BYTES, check_digest, missing_blob
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.partial_blob import BusyError
from arclight.federated.errors import BlobError, FederatedError, LinkError

_REQUEST_BYTES = 16 * CHUNK_BYTES
"""Bytes that one request reads."""
_STUCK_TIMEOUT_S = 60.0
"""Seconds without progress after which another process's fetch of the same blob counts as dead."""


class ObjectStore:
    """Implement `BlobStore` at an address.

    What is put and what is fetched is also kept in ``cache``, verified; an upload that breaks off begins again.

    Every holder of the store's credentials can read and write all of it. Large blobs go up in parts, several at a time.
    Raises FederatedError for an address that is a local folder: that is a `FolderStore`.
    """

    def __init__(self, address: str, cache: FolderStore | Path) -> None:
        root = to_path(address)
        if not is_remote(root):
            raise FederatedError(f"{address} is a folder here: FolderStore is for those")
        self._root = cast(RemotePath, root)
        self._cache = cache if isinstance(cache, FolderStore) else FolderStore(cache)

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all blobs that are there."""
        try:
            names = [entry.name for entry in self._root.iterdir()]
        except FileNotFoundError:
            return iter(())
        return (name for name in names if not name.startswith("."))

    def size(self, digest: str) -> int | None:
        try:
            return int(self._path(digest).stat().st_size)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreachable("tell the size of", digest, error) from error

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Read a part of a blob, unverified.

        Only the whole has the digest.
        """
        size = self.size(digest)
        if size is None:
            raise missing_blob(digest, str(self._root))
        stop = size if length is None else offset + length
        if stop > size:
            raise BlobError(f"blob {digest[:12]} has {size} bytes: it ends before byte {stop}")
        return self._chunks(digest, offset, stop)

    def put(self, digest: str, source: Path | bytes) -> None:
        self._cache.put(digest, source)  # verified there
        if self.size(digest) is not None:
            return
        local = self._cache.file(digest)
        try:
            self._path(digest).upload(local)
        except OSError as error:
            raise self._unreachable("take", digest, error) from error
        if (found := self.size(digest)) != local.stat().st_size:
            raise BlobError(
                f"blob {digest[:12]} has {found} bytes at {self._root}, {local.stat().st_size} were put there"
            )

    def file(self, digest: str) -> Path:
        came, since = -1, time.monotonic()
        while self._cache.size(digest) is None:
            try:
                self._fetch(digest)
            except BusyError:  # another thread or process of this machine is at it: as long as it gets on
                if (now := self._cache.received(digest)) != came:
                    came, since = now, time.monotonic()
                elif time.monotonic() - since > _STUCK_TIMEOUT_S:
                    raise
                time.sleep(0.05)
        return self._cache.file(digest)

    def forget(self, digest: str) -> None:
        self._cache.remove(digest)

    def remove(self, digest: str) -> None:
        """Remove a blob, there and in the cache."""
        self._cache.remove(digest)
        try:
            with suppress(FileNotFoundError):
                self._path(digest).unlink()
        except OSError as error:
            raise self._unreachable("remove", digest, error) from error

    def _fetch(self, digest: str) -> None:
        """Fetch the rest into the cache."""
        size = self.size(digest)
        if size is None:
            raise missing_blob(digest, str(self._root))
        with self._cache.receive(digest) as incoming:
            if self._cache.size(digest) is not None:
                incoming.give_up()
                return
            for chunk in self._chunks(digest, min(incoming.offset, size), size):
                incoming.write((chunk,))
            incoming.finish()

    def _chunks(self, digest: str, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            end = min(stop, start + _REQUEST_BYTES)
            try:
                chunk = self._path(digest).read_range(start, end)
            except FileNotFoundError:
                raise missing_blob(digest, str(self._root)) from None
            except OSError as error:
                raise self._unreachable("give", digest, error) from error
            if len(chunk) != end - start:
                raise BlobError(f"blob {digest[:12]} at {self._root} gave {len(chunk)} bytes of {end - start}")
            yield chunk
            start = end

    def _path(self, digest: str) -> RemotePath:
        return self._root / check_digest(digest)

    def _unreachable(self, what: str, digest: str, error: OSError) -> LinkError:
        return LinkError(f"{self._root} did not {what} blob {digest[:12]}; what was to be sent is kept: {error}")


class MirroredStore(FolderStore):
    """Mirror a folder at an address, where nodes put and get blobs without passing the server.

    What is put here is put there, what is only there is fetched, what is removed here is removed there.

    Iterating gives the blobs that are here. Besides what a folder raises, LinkError if the address cannot be reached.
    """

    def __init__(self, folder: str | Path, address: str) -> None:
        super().__init__(folder)
        self._here = FolderStore(folder)
        self._there = ObjectStore(address, self._here)

    @property
    def here(self) -> FolderStore:
        return self._here

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
