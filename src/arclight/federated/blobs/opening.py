"""The tensors of a manifest, read from their blobs when they are asked for."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch

from arclight.checkpoint.files import HashedFile, PlacedFile
from arclight.checkpoint.stored import Piece, StoredTensor
from arclight.checkpoint.tensorfile import DTYPES, from_bytes, memory_of, read_header
from arclight.federated.blobs.packing import Encoded, part_name
from arclight.federated.blobs.store import BlobStore
from arclight.federated.errors import BlobError
from arclight.federated.protocol.manifest import Entry, Manifest

_AT_ONCE = 4
"""Blobs that are fetched at the same time."""


class Opened(Mapping[str, Encoded]):
    """Manifest keys to tensors as they travelled; made by `open_manifest`.

    ``opened[key]`` maps the file: nothing is copied, and writing to such a tensor changes neither the file nor what others
    see of it. `read` copies one tensor into memory of its own, which is given back with it: for passes over many files.
    """

    def __init__(self, manifest: Manifest, files: Mapping[str, _File]) -> None:
        self.manifest, self._files = manifest, files

    def __getitem__(self, key: str) -> Encoded:
        return self._take(key, _File.mapped)

    def read(self, key: str) -> Encoded:
        """A tensor in memory of its own. Raises KeyError for a key that is not there, BlobError where the file fails."""
        return self._take(key, _File.copied)

    def stored(self, key: str) -> StoredTensor:
        """A raw tensor, left in its file and read in parts. Raises as `read`, some of it once it is read."""
        entry = self.manifest.tensors[key]
        return self._files[entry.blob].stored(key if entry.name is None else entry.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def _take(self, key: str, how: Callable[[_File, str], torch.Tensor]) -> Encoded:
        entry = self.manifest.tensors[key]
        file = self._files[entry.blob]
        name = key if entry.name is None else entry.name
        return Encoded(
            parts={part: how(file, part_name(name, part)) for part in entry.parts},
            dtype=entry.dtype,
            shape=entry.shape,
            codec=entry.codec,
            settings=entry.settings,
        )


def open_manifest(manifest: Manifest, store: BlobStore) -> Opened:
    """The tensors of ``manifest``, whose blobs are fetched first where ``store`` is not here.

    Raises BlobError where a blob is missing or no safetensors file, or where it does not hold what the manifest says: each
    tensor that it names, under the size of the file, and for raw ones the type and shape. What encoded ones need is for their
    codec to check.
    """
    for key, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0 or not entry.parts:
            raise BlobError(f"{key} cannot be: type {entry.dtype!r}, shape {entry.shape}, parts {entry.parts}")
        if entry.blob not in manifest.blobs:
            raise BlobError(f"{key} lies in blob {entry.blob[:12]}, which its manifest does not list")

    def opened(digest: str) -> _File:
        return _File(digest, store.file(digest), manifest.blobs[digest])

    if len(manifest.blobs) == 1:
        files = {digest: opened(digest) for digest in manifest.blobs}
    else:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="arclight-blobs") as pool:
            files = dict(zip(manifest.blobs, pool.map(opened, manifest.blobs), strict=True))
    for key, entry in manifest.tensors.items():
        files[entry.blob].check(key, entry)
    return Opened(manifest, files)


class _File:
    """One blob with its header read."""

    def __init__(self, digest: str, path: Path, size: int) -> None:
        self._digest, self._path = digest, path
        found = path.stat().st_size
        if found != size:
            raise BlobError(f"blob {digest[:12]} has {found} bytes, its manifest says {size}")
        try:
            with path.open("rb") as file:
                self._slots = read_header(HashedFile(file), size)
            if any(type(n) is not int for slot in self._slots.values() for n in (slot.begin, slot.bytes, *slot.shape)):
                raise ValueError("places and shapes are whole numbers")
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
            raise BlobError(f"blob {digest[:12]} is no safetensors file: {type(error).__name__}: {error}") from error

    def check(self, key: str, entry: Entry) -> None:
        name = key if entry.name is None else entry.name
        for part in entry.parts:
            if part_name(name, part) not in self._slots:
                raise BlobError(
                    f"blob {self._digest[:12]} has no tensor {part_name(name, part)!r}, its manifest says it has"
                )
        if entry.codec == "raw":
            slot = self._slots[name] if entry.parts == ("",) else None
            if slot is None or slot.dtype != DTYPES[entry.dtype] or tuple(slot.shape) != entry.shape:
                there = f"{slot.dtype} {slot.shape}" if slot else f"in parts {entry.parts}"
                raise BlobError(
                    f"{key} lies in blob {self._digest[:12]} as {there}, its manifest says {entry.dtype} {list(entry.shape)}"
                )

    def mapped(self, name: str) -> torch.Tensor:
        slot = self._slots[name]
        if not slot.bytes or slot.begin % slot.dtype.itemsize:
            return self.copied(name)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=slot.bytes, offset=slot.begin)
        return from_bytes(raw, slot.dtype, slot.shape)

    def copied(self, name: str) -> torch.Tensor:
        slot = self._slots[name]
        raw = torch.empty(slot.bytes, dtype=torch.uint8)
        try:
            if slot.bytes:
                PlacedFile(self._path).read_at(slot.begin, memory_of(raw))
        except (OSError, EOFError) as error:
            raise BlobError(f"blob {self._digest[:12]} cannot be read any more: {error}") from error
        return from_bytes(raw, slot.dtype, slot.shape)

    def stored(self, name: str) -> StoredTensor:
        slot = self._slots[name]
        shape = tuple(slot.shape)
        try:
            source = _Source(self._digest, PlacedFile(self._path))
        except OSError as error:
            raise BlobError(f"blob {self._digest[:12]} cannot be read any more: {error}") from error
        return StoredTensor(shape, slot.dtype, [Piece(source, slot.begin, (0,) * len(shape), shape)])

    @cached_property
    def _map(self) -> mmap.mmap:
        """Private to whoever writes into it; the file stays as it is."""
        with self._path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class _Source:
    """A blob that tensors are read from in parts; what fails of it is a BlobError."""

    def __init__(self, digest: str, file: PlacedFile) -> None:
        self.name, self._file = f"blob {digest[:12]}", file

    def read_at(self, position: int, target: memoryview) -> None:
        try:
            self._file.read_at(position, target)
        except (OSError, EOFError) as error:
            raise BlobError(f"{self.name} cannot be read any more: {error}") from error
