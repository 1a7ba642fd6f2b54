"""Define manifests: named tensors in content-addressed files (blobs).

A blob is a safetensors file and is called by its SHA-256. A tensor is one entry of a manifest: the blob that holds it, how it is encoded
there, and its dtype and shape once decoded. It is stored in one or several parts: part "" under its own key, others (scales, indices) under
``key#part``.

`blobs.manifest_io`, `rounds.writer` and `server.published_weights` make manifests; messages and delta chains carry them. `Manifest.to_json`
must go on giving the same text: its digest names weights and updates in journals, orders and folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from arclight.federated.errors import ProtocolError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION = 1
"""Version of manifests; messages have their own."""
Kind = Literal["weights", "delta", "update"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor."""

    blob: str
    """SHA-256 of the file that holds it, 64 hexadecimal digits."""
    dtype: str
    """Dtype of the decoded tensor, as safetensors names it: "F32", "BF16"."""
    shape: tuple[int, ...]
    codec: str = "raw"
    """How its values are written: "raw" (as they are), "bf16", "int8", "int4", "topk"."""
    parts: tuple[str, ...] = ("",)
    """Suffixes of the tensors in the blob that it is made of: "" is the key itself, "scale" is ``key#scale``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What decoding needs besides, as the codec's block size; JSON values."""
    name: str | None = None
    """Name of the tensor in the blob, if that is not the key: a checkpoint's file has no ``model/`` before its names."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Set of named tensors: ``model/<parameter name>``, and ``<state>/<parameter name>``.

    States are local moments of clients' optimizers, as ``exp_avg``.
    """

    kind: Kind
    """Weights; the change from ``base`` to the next weights, sent down; or a client's update, sent up."""
    tensors: dict[str, Entry]
    blobs: dict[str, int]
    """Every blob that the tensors lie in, and its bytes."""
    base: str | None = None
    """Digest of the weights' manifest that this is a change of; None for weights."""
    version: int = VERSION

    @property
    def size(self) -> int:
        """Return the bytes of all blobs, without the manifest."""
        return sum(self.blobs.values())

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the manifest's text, which names all of its content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical text: the same manifest always gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse a manifest; inverse of `to_json`.

        Raises ProtocolError for an invalid one, or another version.
        """
        return cls.from_dict(_json(text))

    @classmethod
    def from_dict(cls, table: Any) -> Manifest:
        """Build a manifest from JSON values. Raises ProtocolError as `from_json`."""
        from pydantic import ValidationError

        if not isinstance(table, Mapping):
            raise ProtocolError(f"a manifest is a table, got {type(table).__name__}")
        if table.get("version") != VERSION:
            raise ProtocolError(
                f"a manifest of version {table.get('version')!r}: this side speaks {VERSION}; install the same arclight on both"
            )
        try:
            made = _adapter().validate_json(json.dumps(table), strict=True)
        except (ValidationError, ValueError) as error:
            raise ProtocolError(f"this is not a manifest: {error}") from error
        if lost := [key for key, entry in made.tensors.items() if entry.blob not in made.blobs]:
            raise ProtocolError(f"{lost[0]} lies in a blob that the manifest does not list ({len(lost)} such tensors)")
        return made


@cache
def _adapter() -> TypeAdapter[Manifest]:
    from pydantic import TypeAdapter

    return TypeAdapter(Manifest)


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"this is not a manifest: {error}") from error


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
