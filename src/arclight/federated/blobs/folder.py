"""Store blobs in a folder as files ``<digest>``: the store of servers, nodes and caches.

A blob is renamed to its digest once all bytes are there and hash to it (a file that is adopted was hashed when it was written). Any number of
threads and processes may use one folder. An upload or download that broke off stays under ``.partial/``, and the next attempt resumes it.

Names of blobs, ``.partial`` and ``.since`` (the boot in which blobs were last verified) are found by later versions: they stay.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from arclight.checkpoint.files import HashedFile
from arclight.fabric import atomic_replace
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.blobs.blob_store import check_digest, missing_blob, read_chunks, wrong_content
from arclight.federated.blobs.partial_blob import PartialBlob, explain_no_space
from arclight.federated.errors import BlobError

Durable = Literal["all", "made", "none"]

_PARTIAL, _SINCE = ".partial", ".since"
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def running_since() -> str:
    """Return the id of this boot of the machine, "" if the system has none.

    With equal ids there was no power failure in between.
    """
    with suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""


class FolderStore:
    """Store of blobs in a folder, created if missing.

    Temporary files of dead processes are removed. keep_partial_s: seconds for which a blob that came only in part waits for the rest.
    durable: which blobs are synced to disk before their name appears, so that a power failure cannot lose them: all, only those made here
    (`create`), or none, if others have them too or they can be made again. What need not be there after a power failure is verified when
    the folder is first opened after one (any restart of the machine), and removed if its hash differs.
    """

    def __init__(self, folder: str | Path, *, keep_partial_s: float = 86_400.0, durable: Durable = "all") -> None:
        self.folder, self._durable = Path(folder), durable
        self._partial = self.folder / _PARTIAL
        self._partial.mkdir(parents=True, exist_ok=True)
        self.sweep(keep_partial_s)
        if durable != "all":
            self._verify_after_a_restart()

    def __repr__(self) -> str:
        return f"FolderStore({str(self.folder)!r})"

    @property
    def here(self) -> FolderStore:
        """Store of this machine alone."""
        return self

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all blobs that are there."""
        for entry in os.scandir(self.folder):
            if not entry.name.startswith("."):
                yield entry.name

    def size(self, digest: str) -> int | None:
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        return read_chunks(self.file(digest), offset, length)

    def file(self, digest: str) -> Path:
        path = self._path(digest)
        if not path.exists():
            raise missing_blob(digest, self.folder)
        return path

    def put(self, digest: str, source: Path | bytes) -> None:
        """Put as `BlobStore.put`.

        A file on the same file system is linked, not copied: it must not be changed in place afterwards.
        """
        if self.size(digest) is not None:
            return
        if isinstance(source, bytes):
            self._copy(digest, (source,))
            return
        with source.open("rb", buffering=0) as file:
            seen = os.fstat(file.fileno())
            if seen.st_dev == self.folder.stat().st_dev:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != digest:
                    raise wrong_content(digest, found, seen.st_size)
                if self._link(digest, source, seen):
                    return
        self._copy(digest, read_chunks(source))

    def adopt(self, digest: str, path: Path) -> None:
        """Keep a file under the SHA-256 computed when it was written.

        It is linked and not read again.

        It must not be changed in place afterwards. On another file system it is copied, and verified on the way.
        """
        if self.size(digest) is None:
            self._link_or_copy(digest, path)

    @contextmanager
    def create(self, digest: str | None = None) -> Iterator[HashedFile]:
        """Yield a file to write a new blob into.

        It is there, under its SHA-256, when the block ends.

        digest: which one it has to be. Raises BlobError, and keeps nothing, if another comes out.
        """
        with self._write(digest, durable=self._durable != "none") as file:
            yield file

    @contextmanager
    def _write(self, digest: str | None, *, durable: bool) -> Iterator[HashedFile]:
        temporary = atomic_replace.temporary_path(self.folder / "blob")
        what = "a new blob" if digest is None else f"blob {check_digest(digest)[:12]}"
        try:
            with explain_no_space(self.folder, what), temporary.open("xb") as file:
                writer = HashedFile(file)
                yield writer
                if digest not in (None, writer.sha256):
                    raise wrong_content(digest, writer.sha256, writer.bytes)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(self._path(writer.sha256))
            if durable:
                atomic_replace.sync_folder(self.folder)
        finally:
            atomic_replace.discard(temporary)

    def receive(self, digest: str) -> PartialBlob:
        """Resume a blob that comes in chunk by chunk, from where the last attempt ended.

        Raises BusyError if another thread or process is receiving it.
        """
        return PartialBlob(
            digest, self._partial / check_digest(digest), self._path(digest), durable=self._durable == "all"
        )

    def received(self, digest: str) -> int:
        """Return the bytes that an earlier or running attempt left of a blob that is not there yet."""
        try:
            return (self._partial / check_digest(digest)).stat().st_size
        except FileNotFoundError:
            return 0

    def check(self, digest: str) -> None:
        """Read a blob again.

        Raises BlobError, and removes it, if the disk no longer gives what was put there.
        """
        with self.file(digest).open("rb", buffering=0) as file:
            found, size = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
        if found != digest:
            self.remove(digest)
            raise BlobError(
                f"blob {digest[:12]} in {self.folder} has changed since it was put there (now {found[:12]}, {size} bytes): "
                f"it was removed; put it again, and look after that disk"
            )

    def forget(self, digest: str) -> None:
        """Do nothing: there is no other copy."""
        check_digest(digest)

    def remove(self, digest: str) -> None:
        self._path(digest).unlink(missing_ok=True)

    def discard(self, digest: str) -> bool:
        """Remove a blob, or its partial file; False if someone is writing it."""
        if self.received(digest) and not PartialBlob.drop(self._partial / digest):
            return False
        self.remove(digest)
        return True

    def sweep(self, keep_partial_s: float = 0.0) -> None:
        """Remove files of killed processes, and partial blobs older than ``keep_partial_s``."""
        atomic_replace.sweep(self.folder)
        for entry in self._partial.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime >= keep_partial_s:
                    PartialBlob.drop(entry)

    def _verify_after_a_restart(self) -> None:
        marker, since = self.folder / _SINCE, running_since()
        if since and marker.exists() and marker.read_text(encoding="utf-8") == since:
            return
        for digest in list(self):
            with suppress(BlobError):  # it is removed
                self.check(digest)
        replace_text(marker, since, durable=False)

    def _path(self, digest: str) -> Path:
        return self.folder / check_digest(digest)

    def _link_or_copy(self, digest: str, path: Path) -> None:
        if not self._link(digest, path, path.stat()):
            self._copy(digest, read_chunks(path))

    def _copy(self, digest: str, chunks: Iterable[bytes]) -> None:
        with self._write(digest, durable=self._durable == "all") as file:
            for chunk in chunks:
                file.write(chunk)

    def _link(self, digest: str, source: Path, seen: os.stat_result) -> bool:
        """Link a file under its digest, if it is still the one that was seen.

        False if links cannot be.
        """
        target = self._path(digest)
        if self._durable == "all":
            with source.open("rb") as file:
                os.fsync(file.fileno())
        temporary = atomic_replace.temporary_path(target)
        try:
            os.link(source, temporary)
            now = temporary.stat()
            if (now.st_ino, now.st_size, now.st_mtime_ns) != (seen.st_ino, seen.st_size, seen.st_mtime_ns):
                raise BlobError(
                    f"{source} was changed while it became blob {digest[:12]}: put it again once it is finished"
                )
            temporary.replace(target)
            if self._durable == "all":
                atomic_replace.sync_folder(self.folder)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        finally:
            atomic_replace.discard(temporary)
        return True
