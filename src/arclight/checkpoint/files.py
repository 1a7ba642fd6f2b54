"""Every call to the file system that a checkpoint needs: durable writes, hashed reads, replacing a folder in one step.

A folder under construction lies beside its destination as ``.<name>.saving-<host>-<pid>-<process>-<number>``; where the
file system cannot exchange two folders, the old one waits as ``.<name>.replaced-...`` meanwhile. The name tells whether
the process that made it still lives, so what a killed process left behind can be told from work in progress.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from arclight.checkpoint import remote

MANIFEST = "manifest.json"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_PROCESS = secrets.token_hex(4)  # tells this process from an earlier one with the same id, as restarted containers have
_numbers = itertools.count()
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced)-(?P<host>\w+)-(?P<pid>\d+)-(?P<process>\w+)-\d+")


class HashedFile:
    """A file read or written once from front to back, with the SHA-256 and number of bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes; raises EOFError where the file ends before."""
        data = bytearray(count)
        self.readinto(memoryview(data))
        return bytes(data)

    def readinto(self, target: memoryview) -> None:
        """Fill `target`; raises EOFError where the file ends before."""
        filled = 0
        while filled < len(target):
            count = self._file.readinto(target[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"the file ends after {self.bytes + filled} bytes")
            filled += count
        self._hash.update(target)
        self.bytes += len(target)

    def skip(self, count: int) -> None:
        """Pass over `count` bytes, which count for the hash."""
        buffer = memoryview(bytearray(min(count, 1 << 20)))
        for start in range(0, count, len(buffer) or 1):
            self.readinto(buffer[: min(len(buffer), count - start)])

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def create(path: Path) -> Iterator[HashedFile]:
    """A new file that is on the disk when the block ends."""
    if isinstance(path, remote.RemotePath):
        with remote.reaching(path), path.open("wb") as file:
            yield HashedFile(file)
        return
    with path.open("xb") as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def open_hashed(path: Path) -> Iterator[HashedFile]:
    with remote.reaching(path), path.open("rb") as file:
        yield HashedFile(file)


class PlacedFile:
    """A file read from any place in it."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        self._file = None if remote.is_remote(path) else path.open("rb", buffering=0)

    def read_at(self, position: int, target: memoryview) -> None:
        """Fill `target` from byte `position` on; raises EOFError where the file ends before."""
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
    with remote.reaching(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_staging(path: Path) -> Path:
    """A new empty folder beside `path`, whose parents are made where they are missing."""
    if isinstance(path, remote.RemotePath):
        return cast(Path, remote.make_staging(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = _temporary(path, "saving")
    staging.mkdir()
    return staging


def data_folder(staging: Path) -> str:
    """Where below the checkpoint's name its files are to lie; empty where the whole folder moves there."""
    return staging.name if remote.is_remote(staging) else ""


def is_there(path: Path) -> bool:
    """Whether something has that name, be it a link to nothing."""
    return path.exists() or path.is_symlink()


def is_empty(path: Path) -> bool:
    """Whether it is a folder with nothing in it, or nothing but what killed saves left at an address."""
    if not path.is_dir():
        return False
    return all(remote.is_remote(path) and entry.name.startswith(remote.PREFIX) for entry in path.iterdir())


def publish(staging: Path, path: Path) -> None:
    """Put the folder `staging` at `path`; what was there stays complete until the new one is there."""
    if isinstance(staging, remote.RemotePath) and isinstance(path, remote.RemotePath):
        remote.publish(staging, path, MANIFEST)
        return
    _sync_folder(staging)
    if not os.path.lexists(path):
        staging.rename(path)
        _sync_folder(path.parent)
    elif _exchange(staging, path):
        _sync_folder(path.parent)
        discard(staging)  # holds the former checkpoint now
    else:
        former = _temporary(path, "replaced")
        path.rename(former)
        staging.rename(path)
        _sync_folder(path.parent)
        discard(former)


def retire(path: Path) -> None:
    """Remove a folder so that no half of it is ever seen under its name."""
    if isinstance(path, remote.RemotePath):
        remote.retire(path, MANIFEST)
        return
    doomed = _temporary(path, "saving")
    path.rename(doomed)
    _sync_folder(path.parent)
    discard(doomed)


def replace_file(path: Path, content: Path) -> None:
    """Put the finished file `content` at `path` in one step."""
    content.replace(path)
    _sync_folder(path.parent)


def temporary_file(path: Path) -> Path:
    """Name for a file under construction that is to replace `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _temporary(path, "saving")


def sweep(folder: Path) -> list[Path]:
    """Remove what killed processes left in `folder`, and put back a checkpoint that was about to be replaced.

    Returns what was removed or put back. Leaves alone what a living process may still be writing.
    """
    handled: list[Path] = []
    if remote.is_remote(folder):
        return handled  # processes elsewhere may be at work there: the next save under a name cleans it up
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or _alive(match):
            continue
        destination = folder / match["name"]
        if match["kind"] == "replaced" and not os.path.lexists(destination):
            with suppress(FileNotFoundError):  # another process has just put it back
                entry.rename(destination)
                _sync_folder(folder)
        else:
            discard(entry)
        if not os.path.lexists(entry):
            handled.append(entry)
    return handled


def discard(path: Path) -> None:
    """Remove a temporary file or folder; what cannot be removed now is left to the next `sweep`."""
    if isinstance(path, remote.RemotePath):
        with suppress(OSError):
            if not _is_published(path):
                path.remove_tree()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _is_published(staging: remote.RemotePath) -> bool:
    """Whether the manifest that counts names this folder."""
    manifest = staging.parent / MANIFEST
    return manifest.exists() and staging.name.encode() in manifest.read_bytes()


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{_HOST}-{os.getpid()}-{_PROCESS}-{next(_numbers)}")


def _alive(match: re.Match[str]) -> bool:
    """Whether the process that made a temporary folder may still be at work on it."""
    if match["host"] != _HOST:
        return True  # another machine's processes cannot be seen from here
    pid = int(match["pid"])
    if pid == os.getpid():
        return match["process"] == _PROCESS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Make names and renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
