"""Store checkpoints at remote URLs such as ``s3://bucket/runs/1``, through fsspec.

An object store cannot rename a folder. Files are put below the checkpoint's name in a folder of their own, ``data-<hex digits>``, and
the manifest, which names that folder, is put last in one piece: until then what was there before is whole, afterwards its files are
removed. Options of a file system are fsspec's own (its configuration files, its environment variables). Its errors, whichever library
raises them, become an OSError that says where and what to do.

`files` calls this for remote paths; the Trainer, the commands and federated rounds pass checkpoint paths of users through `to_path`.
`RemotePath` has the part of ``pathlib.Path`` that these use. The layout may not change: checkpoints that were written before must open.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from arclight._installed import pip_install
from arclight.checkpoint.errors import CheckpointError

PREFIX = "data-"
COMING = ".coming-"
"""Prefix of files under upload in places where a partial file would be visible."""

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2"})
"""File systems without folders, where a call to make one could create a bucket of a mistyped name; an upload appears there when complete."""

_OF_CONTENT = (CheckpointError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError)
"""Errors of the content that was read, not of reading."""


def to_path(path: str | Path) -> Path:
    """Return the path of a local name or ``file://`` URL, or a RemotePath."""
    if isinstance(path, RemotePath):
        return cast(Path, path)
    text = str(path)
    if "://" not in text or isinstance(path, Path):
        return Path(path)
    protocol, _, name = text.partition("://")
    return Path(name) if protocol in ("file", "local") else cast(Path, RemotePath(text))


def to_absolute_path(path: str | Path) -> Path:
    """Make `path` independent of the working directory, which may change before it is used."""
    found = to_path(path)
    return found if is_remote(found) else found.absolute()


def is_remote(path: object) -> bool:
    return isinstance(path, RemotePath)


class RemotePath:
    """Remote URL in a file system of fsspec.

    Raises CheckpointError for one whose file system is not installed.
    """

    def __init__(self, address: str, system: Any = None) -> None:
        self.address = address.rstrip("/")
        self._system = system or _system(address)
        self._key = self._system._strip_protocol(self.address)

    def __reduce__(self) -> Any:
        return RemotePath, (self.address,)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.address}/{name}", self._system)

    def __str__(self) -> str:
        return self.address

    __repr__ = __fspath__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.address == self.address

    def __lt__(self, other: RemotePath) -> bool:
        return self.address < other.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    def name(self) -> str:
        return PurePosixPath(self.address.partition("://")[2]).name

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.address.rpartition("/")[0], self._system)

    def resolve(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        return bool(self._ask("exists", self._key))

    def is_dir(self) -> bool:
        return bool(self._ask("isdir", self._key))

    def is_file(self) -> bool:
        return bool(self._ask("isfile", self._key))

    def iterdir(self) -> Iterator[RemotePath]:
        for entry in self._ask("ls", self._key, detail=False):
            yield self / str(entry).rstrip("/").rpartition("/")[2]

    def stat(self) -> Any:
        return SimpleNamespace(st_size=int(self._ask("info", self._key)["size"]))

    def open(self, mode: str = "rb", **_: Any) -> Any:
        if "r" not in mode:
            self._make_parent()
        return self._ask("open", self._key, mode)

    def read_bytes(self) -> bytes:
        return bytes(self._ask("cat_file", self._key))

    def read_range(self, start: int, stop: int) -> bytes:
        return bytes(self._ask("cat_file", self._key, start=start, end=stop))

    def write_bytes(self, content: bytes) -> None:
        self._make_parent()
        self._ask("pipe_file", self._key, content)

    def upload(self, source: Path) -> None:
        """Upload a local file, which is visible under this name once it is complete."""
        self._make_parent()
        if self.address.partition("://")[0] in _OBJECT_STORES:
            self._ask("put_file", str(source), self._key)
            return
        coming = self.parent / f"{COMING}{uuid.uuid4().hex[:12]}"
        self._ask("put_file", str(source), coming._key)
        self._ask("mv", coming._key, self._key)

    def unlink(self) -> None:
        self._ask("rm_file", self._key)

    def remove_tree(self) -> None:
        """Remove everything below this URL, if there is anything."""
        if self.exists():
            self._ask("rm", self._key, recursive=True)

    def copy_to(self, target: RemotePath) -> None:
        """Copy a file within one file system, which need not send it here and back."""
        target._make_parent()
        self._ask("cp_file", self._key, target._key)

    def _make_parent(self) -> None:
        if self.address.partition("://")[0] not in _OBJECT_STORES:
            self._ask("makedirs", self._system._parent(self._key), exist_ok=True)

    def _ask(self, action: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, with its cache of listings cleared."""
        with explain_remote_errors(self, passing=()):
            self._system.invalidate_cache()
            return getattr(self._system, action)(*arguments, **options)


@contextmanager
def explain_remote_errors(path: object, passing: tuple[type[Exception], ...] = _OF_CONTENT) -> Iterator[None]:
    """Explain errors of reading or writing at a remote URL: OSError with URL and remedy.

    passing: errors that are left as they are. So are all where `path` is local.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, passing) or is_explained(error) or not is_remote(path):
            raise
        raise _explained(str(path), error) from error


def is_explained(error: Exception) -> bool:
    """Return True if an error's text says already where it happened and what to do."""
    return bool(getattr(error, "names_remedy", False))


_CODES: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR, FileExistsError: errno.EEXIST,
}  # fmt: skip


def _explained(address: str, error: Exception) -> OSError:
    code = (error.errno if isinstance(error, OSError) else None) or _CODES.get(type(error), errno.EIO)  # type: ignore[arg-type]
    if isinstance(error, FileNotFoundError):
        advice = "if the bucket or folder is to be there, make it, or correct the address"
    elif isinstance(error, PermissionError):
        advice = "the credentials in use must be allowed to list, read, write and delete there"
    else:
        advice = (
            "check the address, the network, the credentials and the options of the file system (fsspec's configuration, "
            "its environment variables)"
        )
    explained = OSError(code, f"{address}: {type(error).__name__}: {error}; {advice}")
    explained.names_remedy = True  # type: ignore[attr-defined]
    return explained


def check_writable(folder: str | Path) -> None:
    """Check that checkpoints can be written, listed, read and removed at a remote URL.

    Raises OSError.
    """
    probe = cast(RemotePath, to_path(folder)) / f".probe-{uuid.uuid4().hex[:12]}"
    probe.write_bytes(b"arclight")
    try:
        list(probe.parent.iterdir())
        probe.read_bytes()
    finally:
        probe.unlink()


def make_staging(path: RemotePath) -> RemotePath:
    return path / f"{PREFIX}{uuid.uuid4().hex[:12]}"


def publish(staging: RemotePath, path: RemotePath, manifest: str) -> None:
    """Publish the manifest in ``staging``, and remove what it replaces."""
    content = (staging / manifest).read_bytes()
    (path / manifest).write_bytes(content)
    (staging / manifest).unlink()
    for entry in list(path.iterdir()):
        if entry.name.startswith(PREFIX) and entry.name != staging.name:
            entry.remove_tree()


def retire(path: RemotePath, manifest: str) -> None:
    """Remove a checkpoint: its manifest first, so that no half of it is taken for one."""
    (path / manifest).unlink()
    path.remove_tree()


def _system(address: str) -> Any:
    import fsspec

    protocol = address.partition("://")[0]
    try:
        return fsspec.filesystem(protocol)
    except ImportError as error:
        extra = pip_install("s3") if protocol in ("s3", "s3a") else str(error)
        raise CheckpointError(f"{address}: the file system {protocol}:// is not installed: {extra}") from error
    except ValueError as error:
        raise CheckpointError(f"{address}: {error}") from error
