"""Write files durably with their hashes, and replace a checkpoint's folder in one step.

How a local folder is replaced is in `arclight.fabric.atomic_replace`; at a remote URL `remote` replaces the manifest.

`store`, ``sharded``, `conversion`, `dcp` and `retention` write through this, as do ``deploy.formats.export``, federated rounds and blobs,
``text.data.corpus`` and `ModelCheckpoint`. The order (staging folder, sync, manifest, rename) must stay: it keeps an interrupted save
from being read as a checkpoint; ``tests/checkpoint/test_faults.py`` kills it midway.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import BinaryIO, cast

from arclight.checkpoint import remote
from arclight.fabric import atomic_replace

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 18


class HashedFile:
    """File read or written once from front to back, with its SHA-256 and size so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = self._synced = 0

    def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._file.write(chunk)
            self._hash.update(chunk)  # while it is in the cache
        self.bytes += len(data)

    def sync_every(self, size_bytes: int) -> None:
        """Sync to disk after every ``size_bytes`` written, so that closing is quick.

        Does nothing for a remote path.
        """
        if self.bytes - self._synced < size_bytes:
            return
        self._synced = self.bytes
        with suppress(UnsupportedOperation):
            descriptor = self._file.fileno()
            self._file.flush()
            os.fsync(descriptor)

    def read(self, count: int) -> bytes:
        """Read exactly `count` bytes; raises EOFError if the file ends before."""
        data = bytearray(count)
        self.readinto(memoryview(data))
        return bytes(data)

    def readinto(self, target: memoryview) -> None:
        """Fill `target`; raises EOFError if the file ends before."""
        filled = 0
        while filled < len(target):
            count = self._file.readinto(target[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"the file ends after {self.bytes + filled} bytes")
            filled += count
        self._hash.update(target)
        self.bytes += len(target)

    def skip(self, count: int) -> None:
        """Skip `count` bytes, which are still hashed."""
        buffer = memoryview(bytearray(min(count, 1 << 20)))
        for start in range(0, count, len(buffer) or 1):
            self.readinto(buffer[: min(len(buffer), count - start)])

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def create(path: Path) -> Iterator[HashedFile]:
    """Create a file that is synced to the disk when the block ends."""
    if isinstance(path, remote.RemotePath):
        with remote.explain_remote_errors(path), path.open("wb") as file:
            yield HashedFile(file)
        return
    with path.open("xb") as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def open_hashed(path: Path) -> Iterator[HashedFile]:
    with remote.explain_remote_errors(path), path.open("rb") as file:
        yield HashedFile(file)


class PlacedFile:
    """File read at any position, which stays readable if it is replaced or removed."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._file = None if remote.is_remote(path) else path.open("rb", buffering=0)
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def read_at(self, position: int, target: memoryview) -> None:
        """Fill `target` from byte `position` on; raises EOFError if the file ends before."""
        if self._file is None:
            found = self._path.read_range(position, position + len(target))  # type: ignore[attr-defined]
            if len(found) != len(target):
                raise EOFError(f"the file ends after {position + len(found)} bytes")
            target[:] = found
            return
        filled = 0
        while filled < len(target):
            count = os.preadv(self._file.fileno(), [target[filled:]], position + filled)
            if not count:
                raise EOFError(f"the file ends after {position + filled} bytes")
            filled += count


def hash_file(path: Path) -> str:
    with remote.explain_remote_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_staging(path: Path) -> Path:
    """Make an empty staging folder beside `path`, and missing parents."""
    if isinstance(path, remote.RemotePath):
        return cast(Path, remote.make_staging(path))
    return atomic_replace.make_staging(path)


def data_folder(staging: Path) -> str:
    """Return `Manifest.data` for the files in ``staging``.

    Its name at a remote URL; "" locally, where the folder is renamed.
    """
    return staging.name if remote.is_remote(staging) else ""


def is_there(path: Path) -> bool:
    """Return True if the path exists, also as a dangling link."""
    return path.exists() or path.is_symlink()


def is_empty(path: Path) -> bool:
    """Return True for an empty folder; at a URL remains of interrupted saves do not count."""
    if not path.is_dir():
        return False
    return all(remote.is_remote(path) and entry.name.startswith(remote.PREFIX) for entry in path.iterdir())


def publish(staging: Path, path: Path) -> None:
    """Publish the folder `staging` at `path` atomically."""
    if isinstance(staging, remote.RemotePath) and isinstance(path, remote.RemotePath):
        remote.publish(staging, path, MANIFEST)
    else:
        atomic_replace.replace_folder(staging, path)


def retire(path: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name."""
    if isinstance(path, remote.RemotePath):
        remote.retire(path, MANIFEST)
    else:
        atomic_replace.retire(path)


def replace_file(path: Path, content: Path) -> None:
    """Replace `path` by the finished file `content` atomically."""
    content.replace(path)
    atomic_replace.sync_folder(path.parent)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link at ``target``, or a copy if the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def temporary_file(path: Path) -> Path:
    """Return the name of a temporary file that is to replace `path`."""
    return atomic_replace.temporary_path(path)


def sweep(folder: Path) -> list[Path]:
    """Delete what interrupted saves left in a local folder, as `atomic_replace.sweep`.

    At a remote URL other hosts may be writing: the next save under a name cleans it up.
    """
    return [] if remote.is_remote(folder) else atomic_replace.sweep(folder)


def discard(path: Path) -> None:
    """Remove a temporary file or folder; what cannot be removed now is left to the next `sweep`."""
    if isinstance(path, remote.RemotePath):
        with suppress(OSError):
            if not _is_published(path):
                path.remove_tree()
    else:
        atomic_replace.discard(path)


def _is_published(staging: remote.RemotePath) -> bool:
    """Return True if the manifest that counts names this folder."""
    manifest = staging.parent / MANIFEST
    return manifest.exists() and staging.name.encode() in manifest.read_bytes()
