"""Write tensors into blobs by manifest key, and read them back one at a time.

Nodes and server write and read all tensors that travel by it, except rounds' checkpoints, which `rounds.writer` writes as blobs. Blobs are a
wire and disk format: keys, suffixes of parts, the order of tensors and `MAX_BLOB_BYTES` decide their digests, which delta chains compare.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from arclight.checkpoint.files import HashedFile, PlacedFile
from arclight.checkpoint.stored_tensor import Piece, StoredTensor
from arclight.checkpoint.tensorfile import DTYPES, METADATA, NAMES, from_bytes, memory_of, read_header, write_tensors
from arclight.federated.blobs.blob_store import BlobStore
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.protocol.manifest import Entry, Kind, Manifest

MAX_BLOB_BYTES = 256 << 20
"""Bytes at which a further blob is begun; a tensor that is larger has a blob of its own."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor as it travels."""

    parts: Mapping[str, torch.Tensor]
    """Parts by suffix: "" is stored under the tensor's own key, "scale" under ``key#scale``."""
    dtype: str
    """Dtype of the decoded tensor, as safetensors names it."""
    shape: tuple[int, ...]
    codec: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What decoding needs besides; JSON values."""

    @classmethod
    def raw(cls, tensor: torch.Tensor) -> Encoded:
        """Return the encoding of a tensor that travels as it is."""
        return cls(
            parts={"": tensor}, dtype=NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape), codec="raw"
        )

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.itemsize for part in self.parts.values())


class LocalStore(BlobStore, Protocol):
    """A store that blobs can be written into while they are made."""

    def create(self, digest: str | None = None) -> AbstractContextManager[HashedFile]:
        """Yield a new blob's file, there under its SHA-256 when the block ends."""


TensorOrEncoded = torch.Tensor | Encoded


def write_blobs(
    tensors: Mapping[str, TensorOrEncoded] | Iterable[tuple[str, TensorOrEncoded]],
    store: LocalStore,
    *,
    kind: Kind,
    base: str | None = None,
    largest: int = MAX_BLOB_BYTES,
) -> Manifest:
    """Write tensors, raw or encoded, into blobs and return their manifest.

    Tensors are taken one by one, and at most one blob's worth of them is held at a time: a generator that makes them as they
    are asked for needs no more memory than that. Same tensors in the same order, same blobs.
    Raises FederatedError for a key that cannot be one, or comes twice, and for a type that safetensors has no name for.
    """
    entries: dict[str, Entry] = {}
    blobs: dict[str, int] = {}
    held: dict[str, Encoded] = {}
    size = 0

    def flush() -> None:
        with store.create() as file:
            write_tensors(file, {part: tensor for key in held for part, tensor in _named(key, held[key])})
        blobs[file.sha256] = file.bytes
        entries.update((key, _entry(file.sha256, encoded)) for key, encoded in held.items())
        held.clear()

    for key, given in tensors.items() if isinstance(tensors, Mapping) else tensors:
        encoded = Encoded.raw(given) if isinstance(given, torch.Tensor) else given
        _check(key, encoded, taken=key in entries or key in held)
        if held and size + encoded.bytes > largest:
            flush()
            size = 0
        held[key] = encoded
        size += encoded.bytes
    if held:
        flush()
    return Manifest(kind=kind, tensors=entries, blobs=blobs, base=base)


def part_name(name: str, part: str) -> str:
    """Return the name of a part of a tensor within its blob."""
    return f"{name}#{part}" if part else name


def _named(key: str, encoded: Encoded) -> Iterator[tuple[str, torch.Tensor]]:
    for part, tensor in encoded.parts.items():
        yield part_name(key, part), tensor


def _entry(blob: str, encoded: Encoded) -> Entry:
    return Entry(
        blob=blob,
        dtype=encoded.dtype,
        shape=encoded.shape,
        codec=encoded.codec,
        parts=tuple(encoded.parts),
        settings=encoded.settings,
    )


def _check(key: str, encoded: Encoded, *, taken: bool) -> None:
    if not key or "#" in key or key == METADATA:
        raise FederatedError(f"a tensor cannot travel as {key!r}: keys are not empty and have no '#' in them")
    if taken:
        raise FederatedError(f"two tensors are to travel as {key!r}")
    for dtype in (encoded.dtype, *(NAMES.get(part.dtype, str(part.dtype)) for part in encoded.parts.values())):
        if dtype not in DTYPES:
            raise FederatedError(f"{key} is {dtype}, which safetensors files cannot hold")


_THREADS = 4
"""Blobs that are fetched at the same time."""


class ManifestReader(Mapping[str, Encoded]):
    """Read tensors by manifest key as they travelled; made by `open_manifest`.

    ``opened[key]`` maps the file: nothing is copied, and writing to such a tensor changes neither the file nor what others
    see of it. `read` copies one tensor into memory of its own, which is given back with it: for passes over many files.
    """

    def __init__(self, manifest: Manifest, files: Mapping[str, _File]) -> None:
        self.manifest, self._files = manifest, files

    def __getitem__(self, key: str) -> Encoded:
        return self._take(key, _File.mapped)

    def read(self, key: str) -> Encoded:
        """Read a tensor into memory of its own.

        Raises KeyError for a key that is not there, BlobError if the file fails.
        """
        return self._take(key, _File.copied)

    def stored(self, key: str) -> StoredTensor:
        """Return a raw tensor, left in its file and read in parts.

        Raises as `read`, some of it once it is read.
        """
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


def open_manifest(manifest: Manifest, store: BlobStore) -> ManifestReader:
    """Open the tensors of ``manifest``; blobs of a remote ``store`` are fetched first.

    Raises BlobError if a blob is missing or no safetensors file, or if it does not hold what the manifest says: each
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
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="arclight-blobs") as pool:
            files = dict(zip(manifest.blobs, pool.map(opened, manifest.blobs), strict=True))
    for key, entry in manifest.tensors.items():
        files[entry.blob].check(key, entry)
    return ManifestReader(manifest, files)


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
            raise BlobError(f"blob {digest[:12]} is not a safetensors file: {type(error).__name__}: {error}") from error

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
        """Map the file, private to whoever writes into it."""
        with self._path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class _Source:
    """Read a blob in parts; errors become BlobError."""

    def __init__(self, digest: str, file: PlacedFile) -> None:
        self.name, self._file = f"blob {digest[:12]}", file

    def read_at(self, position: int, target: memoryview) -> None:
        try:
            self._file.read_at(position, target)
        except (OSError, EOFError) as error:
            raise BlobError(f"{self.name} cannot be read any more: {error}") from error
