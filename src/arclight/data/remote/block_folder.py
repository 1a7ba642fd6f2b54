"""Cache blocks in a local folder of bounded size that several processes share.

`block_reader` keeps the blocks of remote shards here, and the least recently used ones are deleted; `packing` writes packed samples beside
them (`MADE`). Processes of different versions may share a folder: the layout on disk and the locks stay as they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_HOLDERS, _LOCKS, _USAGE = ".holders", ".locks", ".usage"
_AHEAD = "ahead"
"""File in the folder of a process (holder) that prefetches."""
MADE = ".made"
"""Folder of files derived from blocks, such as packed samples: counted, and never deleted here."""
_STRIPES = 256
"""Lock files for `BlockFolder.claim`; a key belongs to one of them."""
_LOCK_TIMEOUT_S = 60.0
"""Seconds that another process may hold the lock on the folder's size."""
_POLL_S = 0.01
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})


class BlockFolder:
    """Folder of blocks by key (``shard/block``), at most ``bound_bytes`` in all.

    Files derived from the blocks count. A block appears under its name when it is complete. Space for a new one is made by deleting the
    least recently used ones that no process holds. A process holds a block by a hard link in its own folder, which counts until the process
    ends, also by a kill. (On file systems without hard links nothing is held: a block that is deleted too early is fetched again.) Nothing
    is synchronised to the disk: readers verify blocks.
    """

    def __init__(self, root: Path, bound_bytes: int) -> None:
        self.root, self.bound_bytes = root, bound_bytes
        root.mkdir(parents=True, exist_ok=True)
        (root / _LOCKS).mkdir(exist_ok=True)
        self._own = root / _HOLDERS / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        with self._usage():  # so that no process sees the folder without its lock, and takes it for dead
            self._own.mkdir(parents=True)
            self._alive = (self._own / "lock").open("xb")
            fcntl.flock(self._alive, fcntl.LOCK_EX)

    def get(self, key: str) -> bytes | None:
        """Return a block and mark it as used; None if it is not here."""
        path = self.root / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return content

    def reserve(self, size: int) -> Path | None:
        """Make space and return a file of this size to write to; None if held blocks leave no space.

        `put` makes it a block, `unreserve` frees it.
        """
        with self._usage() as usage:
            total = _total(usage)
            if total is None or total + size > self.bound_bytes:
                total = self._clear(self.bound_bytes - size)
            if total + size > self.bound_bytes:
                _set_total(usage, total)
                return None
            path = self._own / f"{uuid.uuid4().hex}.saving"
            with path.open("xb") as file:
                file.truncate(size)  # so that other processes count its bytes
            _set_total(usage, total + size)
        return path

    def put(self, key: str, reserved: Path, content: bytes, *, hold: bool = False) -> None:
        """Store a block in a reserved file, and hold it if asked to.

        Raises OSError, as on a full disk, and frees the file then.
        """
        path = self.root / key
        try:
            with reserved.open("r+b") as file:  # not truncated: other processes count its bytes
                file.write(content)
            path.parent.mkdir(exist_ok=True)
            if path.exists():  # another process was faster
                self.unreserve(reserved)
                if hold:
                    self.hold(key)
                return
            if hold:
                _link(reserved, self._held(key))
            os.replace(reserved, path)
        except OSError:
            if hold:
                self.release(key)
            self.unreserve(reserved)
            raise

    def recount(self) -> int:
        """Recount all files, delete blocks if needed, and return the bytes."""
        with self._usage() as usage:
            total = self._clear(self.bound_bytes)
            _set_total(usage, total)
        return total

    def unreserve(self, reserved: Path) -> None:
        """Delete a reserved file that becomes no block."""
        with self._usage() as usage, suppress(FileNotFoundError):
            size = reserved.stat().st_size
            reserved.unlink()
            if (total := _total(usage)) is not None:
                _set_total(usage, max(0, total - size))

    def hold(self, key: str) -> bool:
        """Keep a block from being deleted until `release`; return False if it is not here."""
        path = self.root / key
        try:
            _link(path, self._held(key))
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def release(self, key: str) -> None:
        self._held(key).unlink(missing_ok=True)

    def count_prefetching(self) -> int:
        """Count the processes that prefetch into this folder.

        This one is counted from its first call to `close`.
        """
        with suppress(FileNotFoundError):  # another thread closed it
            (self._own / _AHEAD).touch()
        marks = (self.root / _HOLDERS).glob(f"*/{_AHEAD}")
        return 1 + sum(mark.parent != self._own and _is_alive(mark.parent) for mark in marks)

    def drop(self, key: str) -> None:
        """Delete a block that is damaged."""
        self.release(key)
        (self.root / key).unlink(missing_ok=True)  # counted until the next clearing

    @contextmanager
    def claim(self, key: str, timeout_s: float, cancel: threading.Event) -> Iterator[None]:
        """Keep other processes and threads from fetching the same block inside the ``with``.

        Waits until they are done, but at most ``timeout_s`` and until ``cancel`` is set; then a block may be fetched twice.
        """
        stripe = zlib.crc32(key.encode()) % _STRIPES
        with (self.root / _LOCKS / f"{stripe:02x}").open("ab") as file:
            until = time.monotonic() + timeout_s
            while not _locked(file) and time.monotonic() < until and not cancel.wait(_POLL_S):
                pass
            yield

    def close(self) -> None:
        """Release all blocks that this process holds."""
        self._alive.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _held(self, key: str) -> Path:
        return self._own / key.replace("/", "-")

    @contextmanager
    def _usage(self) -> Iterator[BinaryIO]:
        """Lock and open the file with the folder's size in bytes."""
        descriptor = os.open(self.root / _USAGE, os.O_RDWR | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            until = time.monotonic() + _LOCK_TIMEOUT_S
            while not _locked(file):
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{self.root / _USAGE} has been locked by another process for {_LOCK_TIMEOUT_S:g} s: end or resume a process that is stopped"
                    )
                time.sleep(_POLL_S)
            yield file

    def _clear(self, wanted: int) -> int:
        """Delete blocks down to ``wanted`` bytes, with some margin, and dead processes' files.

        Returns the bytes left. The margin is a tenth of the bound.
        """
        total = sum(self._sweep(holder) for holder in (self.root / _HOLDERS).iterdir())
        for made in (self.root / MADE).rglob("*"):
            with suppress(FileNotFoundError):
                total += made.stat(follow_symlinks=False).st_size if made.is_file() else 0
        free: list[tuple[int, int, str]] = []
        for folder in os.scandir(self.root):
            if folder.name.startswith(".") or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder):
                with suppress(FileNotFoundError):
                    found = file.stat(follow_symlinks=False)
                    total += found.st_size
                    if found.st_nlink == 1:
                        free.append((found.st_mtime_ns, found.st_size, file.path))
        if total > wanted:
            goal = max(0, wanted - self.bound_bytes // 10)
            for _, size, path in sorted(free):
                if total <= goal:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
        return total

    def _sweep(self, holder: Path) -> int:
        """Return the bytes that only this holder has; delete the folder of a dead one."""
        if holder != self._own:
            with suppress(FileNotFoundError), (holder / "lock").open("rb") as file:
                if _locked(file):
                    shutil.rmtree(holder, ignore_errors=True)
                    return 0
        size = 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(holder):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    size += found.st_size if found.st_nlink == 1 else 0
        return size


def _is_alive(holder: Path) -> bool:
    with suppress(FileNotFoundError), (holder / "lock").open("rb") as file:
        return not _locked(file)
    return False


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise


def _total(usage: BinaryIO) -> int | None:
    usage.seek(0)
    text = usage.read(32).strip()
    return int(text) if text.isdigit() else None


def _set_total(usage: BinaryIO, total: int) -> None:
    usage.seek(0)
    usage.write(f"{total:<31}\n".encode())
