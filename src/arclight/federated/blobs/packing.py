"""Tensors into blobs, and back one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from arclight.checkpoint.files import HashedFile
from arclight.checkpoint.tensorfile import DTYPES, NAMES, write_tensors
from arclight.federated.blobs.store import BlobStore
from arclight.federated.errors import FederatedError
from arclight.federated.protocol.manifest import Entry, Kind, Manifest

LARGEST = 256 << 20
"""Bytes at which a further blob is begun; a tensor that is larger has a blob of its own."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor as it travels."""

    parts: Mapping[str, torch.Tensor]
    """By suffix: "" is what lies under the tensor's own key, "scale" what lies under ``key#scale``."""
    dtype: str
    """Of the tensor once decoded, as safetensors names it."""
    shape: tuple[int, ...]
    codec: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What decoding needs besides; JSON values."""

    @classmethod
    def raw(cls, tensor: torch.Tensor) -> Encoded:
        """A tensor as it is."""
        return cls(
            parts={"": tensor}, dtype=NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape), codec="raw"
        )

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.itemsize for part in self.parts.values())


class LocalStore(BlobStore, Protocol):
    """A store here, which blobs can be written into while they are made."""

    def create(self, digest: str | None = None) -> AbstractContextManager[HashedFile]:
        """A new blob, there under its SHA-256 when the block ends."""


Given = torch.Tensor | Encoded


def write_blobs(
    tensors: Mapping[str, Given] | Iterable[tuple[str, Given]],
    store: LocalStore,
    *,
    kind: Kind,
    base: str | None = None,
    largest: int = LARGEST,
) -> Manifest:
    """Write tensors, raw or encoded, by manifest key into blobs of at most ``largest`` bytes, and say what lies where.

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
    """What a part of a tensor is called in its blob."""
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
    if not key or "#" in key or key == "__metadata__":
        raise FederatedError(f"a tensor cannot travel as {key!r}: keys are not empty and have no '#' in them")
    if taken:
        raise FederatedError(f"two tensors are to travel as {key!r}")
    for dtype in (encoded.dtype, *(NAMES.get(part.dtype, str(part.dtype)) for part in encoded.parts.values())):
        if dtype not in DTYPES:
            raise FederatedError(f"{key} is {dtype}, which safetensors files cannot hold")
