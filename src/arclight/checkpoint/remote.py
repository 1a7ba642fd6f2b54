"""Checkpoints at addresses such as ``s3://bucket/runs/1``, through fsspec.

An object store cannot rename a folder. Files are put below the checkpoint's name in a folder of their own, ``data-<number>``, and
the manifest, which names that folder, is put last in one piece: until then whatever was there before is whole, and after it
the former files go. Options of a file system are fsspec's own (its configuration files, its environment variables).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from arclight.checkpoint.errors import CheckpointError

PREFIX = "data-"


def place(path: str | Path) -> Path:
    """The path of a local name or ``file://`` address; for other addresses what has its methods that a checkpoint needs."""
    if isinstance(path, RemotePath):
        return cast(Path, path)
    text = str(path)
    if "://" not in text or isinstance(path, Path):
        return Path(path)
    protocol, _, name = text.partition("://")
    return Path(name) if protocol in ("file", "local") else cast(Path, RemotePath(text))


def is_remote(path: object) -> bool:
    return isinstance(path, RemotePath)


class RemotePath:
    """An address in a file system of fsspec. Raises CheckpointError for one whose file system is not installed."""

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
        self._system.invalidate_cache()
        return bool(self._system.exists(self._key))

    def is_dir(self) -> bool:
        self._system.invalidate_cache()
        return bool(self._system.isdir(self._key))

    def is_file(self) -> bool:
        return bool(self._system.isfile(self._key))

    def iterdir(self) -> Iterator[RemotePath]:
        self._system.invalidate_cache()
        for entry in self._system.ls(self._key, detail=False):
            yield self / str(entry).rstrip("/").rpartition("/")[2]

    def stat(self) -> Any:
        return SimpleNamespace(st_size=int(self._system.info(self._key)["size"]))

    def open(self, mode: str = "rb", **_: Any) -> Any:
        if "r" not in mode:
            self._system.makedirs(self._system._parent(self._key), exist_ok=True)
        return self._system.open(self._key, mode)

    def read_bytes(self) -> bytes:
        return bytes(self._system.cat_file(self._key))

    def read_range(self, start: int, stop: int) -> bytes:
        return bytes(self._system.cat_file(self._key, start=start, end=stop))

    def write_bytes(self, content: bytes) -> None:
        self._system.makedirs(self._system._parent(self._key), exist_ok=True)
        self._system.pipe_file(self._key, content)

    def unlink(self) -> None:
        self._system.rm_file(self._key)

    def remove_tree(self) -> None:
        """Remove everything below; nothing is fine too."""
        if self.exists():
            self._system.rm(self._key, recursive=True)


def make_staging(path: RemotePath) -> RemotePath:
    return path / f"{PREFIX}{uuid.uuid4().hex[:12]}"


def publish(staging: RemotePath, path: RemotePath, manifest: str) -> None:
    """Let the manifest that lies in ``staging`` count from now on, and remove what it replaces."""
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
        extra = "pip install 'arclight[s3]'" if protocol in ("s3", "s3a") else str(error)
        raise CheckpointError(f"{address}: the file system {protocol}:// is not installed: {extra}") from error
    except ValueError as error:
        raise CheckpointError(f"{address}: {error}") from error
