"""Append a program's metadata to its file, and read it: JSON under ``arclight``, with a checksum.

An ONNX file is a protobuf message, and protobuf reads two messages that follow each other as one. So the description
is appended as a message of its own, where it can be found from the end of the file without a protobuf reader. The
checksum covers every byte before it and the description itself, which lists the files beside it (an ONNX model may
keep weights there) with their checksums.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from arclight.deploy.errors import ExportError, ProgramError

KEY = "arclight"
FORMAT = 2
UNSEALED_DESCRIPTION = 1
"""The format before: its checksum covers the model alone. Read for one more release, with a warning."""
CHUNK = 1 << 20
LARGEST = 1 << 24
"""Bytes of the longest description."""
_METADATA_PROPS, _ENTRY_KEY, _ENTRY_VALUE = 14, 1, 2  # field numbers in onnx.proto: ModelProto, StringStringEntryProto
_LOCATION = b"\n\x08location\x12"  # how an entry of TensorProto.external_data begins that names a file
_LONGEST_NAME = 4096  # of a file, as Linux has it
_SEALED = re.compile(r'(?s)(.*), "sha256": "([0-9a-f]{64})"}')


def check(metadata: dict[str, Any], *, reserved: set[str]) -> None:
    """Raise ExportError for keys that the exporter writes itself, and for values that JSON cannot hold."""
    taken = sorted(({"format", "files", "sha256"} | reserved).intersection(metadata))
    if taken:
        raise ExportError(f"metadata must not hold {', '.join(taken)}: the exporter writes these itself")
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ExportError(f"metadata must be plain JSON: {error}") from error
    if size > LARGEST // 2:
        raise ExportError(f"metadata must be shorter than {LARGEST // 2} bytes as JSON, this has {size}")


def seal(path: Path, metadata: dict[str, Any]) -> None:
    """Append ``metadata`` to the ONNX file at ``path``, with checksums of all that it describes.

    Raises ExportError where the model keeps weights in a file that is missing or outside its folder.
    """
    digest, names = _scan(path, path.stat().st_size)
    files = {}
    for name in sorted(names):
        if not _inside(path, name):
            raise ExportError(f"{path} keeps weights in {name!r}, which is no file beside it: write the model again")
        files[name] = _file_digest(path.parent / name)
    described = {"format": FORMAT, **metadata, "files": files}
    text = json.dumps(described, allow_nan=False, ensure_ascii=False).removesuffix("}")
    digest.update(text.encode())
    with path.open("ab") as file:
        file.write(_record(f'{text}, "sha256": "{digest.hexdigest()}"}}'))


def unseal(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read the description of the program at ``path``, and its JSON; ({}, None) without one.

    No runtime has seen the file by then. Raises ProgramError where the description is malformed or newer, or where it,
    the model or a file beside it are not what was sealed.
    """
    with path.open("rb") as file:
        found = _last_record(file)
    if found is None:
        return {}, None
    length, text = found
    try:
        metadata: dict[str, Any] = json.loads(text)
        number, _ = metadata["format"], metadata["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProgramError(f"{path}: the metadata under {KEY!r} in this ONNX file is malformed: {error!r}") from error
    if number not in (FORMAT, UNSEALED_DESCRIPTION):
        raise ProgramError(
            f"{path} has program format {number!r}, this arclight reads format {FORMAT}: update arclight"
        )
    digest, names = _scan(path, length)
    if number == UNSEALED_DESCRIPTION:
        _check_old(path, metadata, digest.hexdigest(), names)
        return metadata, text
    sealed = _SEALED.fullmatch(text)
    digest.update(sealed[1].encode() if sealed else b"")
    if sealed is None or digest.hexdigest() != sealed[2]:
        raise changed(path)
    files = metadata.get("files")
    if not isinstance(files, dict) or set(files) != names:
        raise changed(path)
    for name, wanted in files.items():
        if not _inside(path, name) or _file_digest(path.parent / name) != wanted:
            raise ProgramError(
                f"{path.parent / name}, which holds weights of {path.name}, is missing or was changed after the export: "
                "copy both again"
            )
    return metadata, text


def _check_old(path: Path, metadata: dict[str, Any], digest: str, names: set[str]) -> None:
    """Raise ProgramError for a changed program of the format before; warn what its checksum leaves out."""
    if digest != metadata["sha256"]:
        raise changed(path)
    if names:
        raise ProgramError(
            f"{path} keeps weights in {', '.join(sorted(names))}, which its checksum does not cover: export it again"
        )
    warnings.warn(
        f"{path} was exported by an older arclight, whose checksum covers the model but not its description (class "
        "names, image size, thresholds): export it again, the next release will not load it",
        stacklevel=4,
    )


def check_weights(path: Path, listed: Collection[str]) -> None:
    """Raise ProgramError if the ONNX model at ``path`` keeps weights in a file that is not ``listed``."""
    _, names = _scan(path, path.stat().st_size)
    if unlisted := sorted(names.difference(listed)):
        raise ProgramError(
            f"{path} keeps weights in {', '.join(map(repr, unlisted[:5]))}, which its digests do not cover: export it again"
        )


def changed(path: Path) -> ProgramError:
    return ProgramError(
        f"{path} was changed after it was exported: its checksum does not fit. Copy or export it again; to run a "
        f"changed model on purpose, remove the {KEY!r} entry from its metadata"
    )


def _last_record(file: BinaryIO) -> tuple[int, str] | None:
    """Find the description that ends the file: the bytes before it, and its text; None without one."""
    size = file.seek(0, 2)
    window, begins = min(1 << 16, size), _field(_ENTRY_KEY, KEY.encode()) + _tag(_ENTRY_VALUE)
    while True:
        file.seek(size - window)
        tail = file.read(window)
        # JSON escapes control characters, so the last place where an entry begins is not inside its text
        if (place := tail.rfind(begins)) >= 0:
            text = tail[_varint_at(tail, place + len(begins))[1] :].decode(errors="replace")
            if tail.endswith(record := _record(text)):
                return size - len(record), text
        if window == min(size, LARGEST):
            return None
        window = min(4 * window, size, LARGEST)


def _scan(path: Path, length: int) -> tuple[Any, set[str]]:
    """Read the first ``length`` bytes once: their SHA-256, and the files beside ``path`` that the model keeps weights in."""
    digest, names, window = hashlib.sha256(), set(), b""
    with path.open("rb") as file:
        while piece := file.read(min(CHUNK, length)):
            length -= len(piece)
            digest.update(piece)
            window = window[-_LONGEST_NAME - len(_LOCATION) - 2 :] + piece
            names |= _locations(window)
    return digest, names


def _locations(window: bytes) -> set[str]:
    """Names of files in the entries of external data that ``window`` holds whole."""
    names, place = set(), window.find(_LOCATION)
    while place >= 0:
        size, start = _varint_at(window, place + len(_LOCATION))
        if 0 < size <= _LONGEST_NAME and start + size <= len(window):
            names.add(window[start : start + size].decode(errors="replace"))
        place = window.find(_LOCATION, start)
    return names


def _inside(path: Path, name: str) -> bool:
    """Return True if ``name`` is a file in the folder of the program at ``path``, or below."""
    place = Path(name)
    return not place.is_absolute() and ".." not in place.parts and (path.parent / place).is_file()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record(text: str) -> bytes:
    """Encode a ModelProto that holds one entry of metadata_props and nothing else."""
    entry = _field(_ENTRY_KEY, KEY.encode()) + _field(_ENTRY_VALUE, text.encode())
    return _field(_METADATA_PROPS, entry)


def _field(number: int, payload: bytes) -> bytes:
    """Encode one length-delimited protobuf field."""
    return _tag(number) + _varint(len(payload)) + payload


def _tag(number: int) -> bytes:
    return _varint(number << 3 | 2)  # wire type 2: length-delimited


def _varint(value: int) -> bytes:
    """Seven bits a byte, least significant first; the high bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint_at(data: bytes, place: int) -> tuple[int, int]:
    """Decode the number at ``place``, and where it ends."""
    value = shift = 0
    while place < len(data):
        byte, place = data[place], place + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place
