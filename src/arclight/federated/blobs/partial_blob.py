"""Receive a blob chunk by chunk, and resume where a broken attempt ended.

`FolderStore.receive` makes one: for the HTTP client, the object store and the server's uploads. A blob appears under its name only whole and
with the right SHA-256; a lock on the partial file lets one attempt at a time write it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arclight.fabric import atomic_replace
from arclight.federated.blobs.blob_store import CHUNK_BYTES, wrong_content
from arclight.federated.errors import BlobError


class BusyError(BlobError):
    """Another thread or process is receiving the same blob; it may be complete soon."""


class PartialBlob:
    """Complete the file ``partial`` and move it to ``target``; hold a lock on it until `close`.

    Raises BusyError if another attempt holds the lock.
    """

    def __init__(self, digest: str, partial: Path, target: Path, *, durable: bool = True) -> None:
        self._digest, self._partial, self._target, self._durable = digest, partial, target, durable
        self._file = _lock(partial)
        if self._file < 0:
            raise BusyError(f"blob {digest[:12]} is just being received from someone else: ask again in a moment")
        try:
            self._hash = hashlib.sha256()
            self._moved = False
            self.offset = 0
            """Bytes that are there; the next chunk goes here."""
            while chunk := os.pread(self._file, CHUNK_BYTES, self.offset):
                self._hash.update(chunk)
                self.offset += len(chunk)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> PartialBlob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Add chunks.

        Raises OSError (ENOSPC and kin) if there is no room, and drops what was there.
        """
        try:
            with explain_no_space(self._target.parent, f"blob {self._digest[:12]}"):
                for chunk in chunks:
                    rest = memoryview(chunk)
                    while rest:
                        count = os.pwrite(self._file, rest, self.offset)
                        self._hash.update(rest[:count])
                        self.offset += count
                        rest = rest[count:]
        except OSError as error:
            if error.errno in atomic_replace.DISK_FULL:
                self.restart()
            raise

    def restart(self) -> None:
        """Drop all that came."""
        os.ftruncate(self._file, 0)
        self._hash, self.offset = hashlib.sha256(), 0

    def finish(self) -> None:
        """Publish the blob. Raises BlobError, and drops what came, if it is not the one named."""
        found, size = self._hash.hexdigest(), self.offset
        if found != self._digest:
            self.restart()
            raise wrong_content(self._digest, found, size)
        if self._durable:
            os.fsync(self._file)
        self._partial.replace(self._target)
        self._moved = True
        if self._durable:
            atomic_replace.sync_folder(self._target.parent)

    def give_up(self) -> None:
        """Drop all that came and unlock: the blob is there already, or is not wanted."""
        self.restart()
        self.close()

    def close(self) -> None:
        """Unlock; what came is kept for the next attempt."""
        if self._file < 0:
            return
        if self.offset == 0 and not self._moved:
            self._partial.unlink()
        os.close(self._file)
        self._file = -1

    @staticmethod
    def drop(partial: Path) -> bool:
        """Remove a partial file; False if someone is writing it."""
        file = _lock(partial)
        if file >= 0:
            partial.unlink()
            os.close(file)
        return file >= 0


def _lock(partial: Path) -> int:
    """Return the file, open and locked; -1 where someone else has it locked."""
    while True:
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), partial.stat()):
                return file
        except BlockingIOError:
            os.close(file)
            return -1
        except FileNotFoundError:
            pass
        os.close(file)  # it was finished or dropped between the two calls: there is a new one to be made


@contextmanager
def explain_no_space(folder: Path, what: str) -> Iterator[None]:
    """Add to an OSError of a full disk which disk, for what, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in atomic_replace.DISK_FULL:
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            error.errno,
            f"no room for {what} in {folder} ({error.strerror}; {free} bytes are free on that disk): nothing of it was kept; "
            f"make room or raise the limit, then try again",
        ) from error
