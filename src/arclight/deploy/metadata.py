"""What a program file says about itself: one JSON text under the key ``arclight``, sealed with a checksum.

An ONNX file is a protobuf message, and protobuf reads two messages that follow each other as one. So the description
is appended as a message of its own, and the checksum covers every byte before it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from arclight.deploy.errors import ExportError, ProgramError

KEY = "arclight"
FORMAT = 1
_METADATA_PROPS, _ENTRY_KEY, _ENTRY_VALUE = 14, 1, 2  # field numbers in onnx.proto: ModelProto, StringStringEntryProto


def check(metadata: dict[str, Any], *, reserved: set[str]) -> None:
    """Raises ExportError for keys that the exporter writes itself, and for values that JSON cannot hold."""
    taken = sorted(({"format", "sha256"} | reserved).intersection(metadata))
    if taken:
        raise ExportError(f"metadata must not hold {', '.join(taken)}: the exporter writes these itself")
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ExportError(f"metadata must be plain JSON: {error}") from error


def seal(path: Path, metadata: dict[str, Any]) -> None:
    """Append ``metadata`` to the ONNX file at ``path``, with the format number and the checksum of what is there."""
    described = {"format": FORMAT, **metadata, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    with path.open("ab") as file:
        file.write(_record(json.dumps(described, allow_nan=False, ensure_ascii=False)))


def unseal(path: Path, text: str) -> dict[str, Any]:
    """The metadata whose JSON is ``text``; ProgramError where it is malformed, newer, or does not fit the file."""
    try:
        metadata = json.loads(text)
        number, digest = metadata["format"], metadata["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise ProgramError(f"{path}: the metadata under {KEY!r} in this ONNX file is malformed: {error!r}") from error
    if number != FORMAT:
        raise ProgramError(
            f"{path} has program format {number!r}, this arclight reads format {FORMAT}: update arclight"
        )
    content, record = path.read_bytes(), _record(text)
    if not content.endswith(record) or hashlib.sha256(content[: -len(record)]).hexdigest() != digest:
        raise ProgramError(
            f"{path} was changed after it was exported: its checksum does not fit. Copy or export it again; to run a "
            f"changed model on purpose, remove the {KEY!r} entry from its metadata"
        )
    result: dict[str, Any] = metadata
    return result


def _record(text: str) -> bytes:
    """A ModelProto that holds one entry of metadata_props and nothing else."""
    entry = _field(_ENTRY_KEY, KEY.encode()) + _field(_ENTRY_VALUE, text.encode())
    return _field(_METADATA_PROPS, entry)


def _field(number: int, payload: bytes) -> bytes:
    """One length-delimited protobuf field (wire type 2)."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    """Seven bits a byte, least significant first; the high bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
