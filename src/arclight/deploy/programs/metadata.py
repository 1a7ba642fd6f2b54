"""Append a description to a lone ONNX program, with checksums, and read it back.

`formats.export` calls `check` and `seal`; `Program.load` calls `unseal` before any runtime reads the file, as ``cli.commands.language`` does. This is
a file format: a change needs a new `FORMAT`, and programs of the format before must load for one more release. The description is JSON under `KEY`,
appended as a protobuf message of its own, since protobuf reads concatenated messages as one: so it is found from the end of the file, and no reader
of protobuf sees a file before its checksum fits (docs/decisions/030). The checksum covers the model and the description, which lists weight files
with checksums of their own.
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
from arclight.fabric.extras import require

KEY = "arclight"
FORMAT = 2
MODEL_CHECKSUM_ONLY = 1
"""The previous format, whose checksum does not cover the description. Read for one more release, with a warning."""
CHUNK = 1 << 20
"""Bytes read at a time."""
MAX_DESCRIPTION_BYTES = 1 << 24
_MAX_PATH_BYTES = 4096  # as on Linux
# Fields are a byte of number and type, a size of seven bits a byte (the high bit is set if more follow), and the content. `r` is field 14
# of ModelProto, metadata_props; entries of it and of TensorProto.external_data have a key, field 1, and a value, field 2.
_SIZE = rb"([\x80-\xff]{0,9}[\x00-\x7f])"
_RECORD = re.compile(b"r" + _SIZE + rb"\Z")
_ENTRY_KEY = b"\n\x08arclight\x12"
_ENTRY = re.compile(_ENTRY_KEY + _SIZE)
_LOCATION = re.compile(b"\n\x08location\x12" + _SIZE)
_SEALED = re.compile(r'(?s)(.*), "sha256": "([0-9a-f]{64})"}')


def check(metadata: dict[str, Any], *, reserved: set[str]) -> None:
    """Raise ExportError if users' ``metadata`` has reserved keys, is too long, or is no JSON."""
    taken = sorted(({"format", "files", "sha256"} | reserved).intersection(metadata))
    if taken:
        raise ExportError(f"metadata must not hold {', '.join(taken)}: the exporter writes these itself")
    try:
        size = len(json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise ExportError(f"metadata must be plain JSON: {error}") from error
    if size > MAX_DESCRIPTION_BYTES // 2:
        raise ExportError(f"metadata must be shorter than {MAX_DESCRIPTION_BYTES // 2} bytes as JSON, this has {size}")


def seal(path: Path, metadata: dict[str, Any]) -> None:
    """Append ``metadata`` to the ONNX file at ``path``, with checksums.

    They are of the model with the metadata, and of each external file. Raises ExportError if the model keeps weights in a file
    that is missing or outside its folder.
    """
    digest, names = _scan(path, path.stat().st_size)
    files = {}
    for name in sorted(names):
        if not _inside(path, name):
            raise ExportError(f"{path} keeps weights in {name!r}, which is not a file beside it: write the model again")
        files[name] = _file_digest(path.parent / name)
    described = {"format": FORMAT, **metadata, "files": files}
    text = json.dumps(described, allow_nan=False, ensure_ascii=False).removesuffix("}")
    digest.update(text.encode())
    onnx = require("onnx", extra="deploy")
    entry = onnx.StringStringEntryProto(key=KEY, value=f'{text}, "sha256": "{digest.hexdigest()}"}}')
    with path.open("ab") as file:
        file.write(onnx.ModelProto(metadata_props=[entry]).SerializeToString())


def unseal(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read the description of the program at ``path``, and its JSON; ({}, None) without one.

    Raises ProgramError if the description is malformed or of a newer format, or if a checksum does not match.
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
    if number not in (FORMAT, MODEL_CHECKSUM_ONLY):
        raise ProgramError(
            f"{path} has program format {number!r}, this arclight reads format {FORMAT}: update arclight"
        )
    digest, names = _scan(path, length)
    if number == MODEL_CHECKSUM_ONLY:
        _check_previous_format(path, metadata, digest.hexdigest(), names)
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


def _check_previous_format(path: Path, metadata: dict[str, Any], digest: str, names: set[str]) -> None:
    """Raise ProgramError for a changed program of the previous format; warn of others.

    Its checksum does not cover the description.
    """
    if digest != metadata["sha256"]:
        raise changed(path)
    if names:
        raise ProgramError(
            f"{path} keeps weights in {', '.join(sorted(names))}, which its checksum does not cover: export it again"
        )
    warnings.warn(
        f"{path} was exported by an older arclight, whose checksum covers the model but not its description (class "
        "names, image size, thresholds): export it again, the next release will not load it",
        stacklevel=5,
    )


def check_weights(path: Path, listed: Collection[str]) -> None:
    """Raise ProgramError if the ONNX model at ``path`` has weights in an unlisted file."""
    _, names = _scan(path, path.stat().st_size)
    if unlisted := sorted(names.difference(listed)):
        raise ProgramError(
            f"{path} keeps weights in {', '.join(map(repr, unlisted[:5]))}, which its digests do not cover: export it again"
        )


def changed(path: Path) -> ProgramError:
    """Return the error for a program whose checksum does not match."""
    return ProgramError(
        f"{path} was changed after it was exported: its checksum does not fit. Copy or export it again; to run a "
        f"changed model on purpose, remove the {KEY!r} entry from its metadata"
    )


def _last_record(file: BinaryIO) -> tuple[int, str] | None:
    """Find the description at the end of the file: bytes before it, and its text; or None."""
    size = file.seek(0, 2)
    window = min(1 << 16, size)
    while True:
        file.seek(size - window)
        tail = file.read(window)
        # JSON escapes control characters, so the last key is not inside the text
        at = tail.rfind(_ENTRY_KEY)
        entry = _ENTRY.match(tail, at) if at >= 0 else None
        record = _RECORD.search(tail, max(0, at - 11), at) if entry is not None else None
        if entry is not None and record is not None:
            sizes = _number(record[1]), _number(entry[1])
            if sizes == (len(tail) - at, len(tail) - entry.end()):
                return size - len(tail) + record.start(), tail[entry.end() :].decode(errors="replace")
        if window == min(size, MAX_DESCRIPTION_BYTES):
            return None
        window = min(4 * window, size, MAX_DESCRIPTION_BYTES)


def _scan(path: Path, length: int) -> tuple[Any, set[str]]:
    """Read the first ``length`` bytes; return their SHA-256, and external weight files."""
    digest, names, window = hashlib.sha256(), set(), b""
    with path.open("rb") as file:
        while piece := file.read(min(CHUNK, length)):
            length -= len(piece)
            digest.update(piece)
            window = window[-_MAX_PATH_BYTES - 22 :] + piece  # with the key and the size of the longest
            names |= _locations(window)
    return digest, names


def _locations(window: bytes) -> set[str]:
    """Return the file names in all complete external-data entries of ``window``."""
    found = ((entry.end(), _number(entry[1])) for entry in _LOCATION.finditer(window))
    return {
        window[start : start + size].decode(errors="replace")
        for start, size in found
        if 0 < size <= _MAX_PATH_BYTES and start + size <= len(window)
    }


def _inside(path: Path, name: str) -> bool:
    """Return True if ``name`` is an existing file in or below the folder of ``path``."""
    place = Path(name)
    return not place.is_absolute() and ".." not in place.parts and (path.parent / place).is_file()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(size: bytes) -> int:
    """Decode a size: seven bits a byte, least significant first."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(size))
