"""Define the manifest of a checkpoint, ``manifest.json``: files, hashes and tensors.

`store`, ``sharded``, `retention`, `inspection` and the writer and reader of federated rounds call it. It is a file format: fields may be
added with a default (releases without them then call the file damaged); anything else needs a new `VERSION`, and old manifests must stay
readable.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from arclight._installed import distribution
from arclight.checkpoint import tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.files import MANIFEST
from arclight.checkpoint.tensorfile import parse_json

NAME, STATE = MANIFEST, "state.json"
FORMAT, VERSION = "arclight-checkpoint", 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class EntrySummary:
    """One top-level entry of a checkpoint's state."""

    file: str
    """File with its tensors; state.json for an entry without tensors."""
    tensors: int
    """Distinct tensors."""
    elements: int
    """Numbers in them."""
    bytes: int
    """Size of them."""
    dtypes: list[str]
    """Their data types, sorted."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of ``manifest.json``."""

    created: str
    """Time of writing, ISO 8601 in UTC."""
    arclight: str
    torch: str
    step: int | None
    epoch: int | None
    files: dict[str, FileRecord]
    entries: dict[str, EntrySummary]
    tensors: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """File -> tensor name -> [dtype, shape]; not of the files that hold parts of tensors."""
    data: str = ""
    """Folder below the checkpoint where the files are; empty for the checkpoint's own folder."""
    processes: int = 1
    """How many processes wrote it."""
    meshes: list[dict[str, int]] = field(default_factory=list)
    """Meshes over which tensors were sharded: dimension -> size."""

    def at(self, path: Path, name: str) -> Path:
        """Return the path of a file of the checkpoint at `path`."""
        return path / self.data / name if self.data else path / name

    def to_json(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "digest": _digest(body)}, indent=1)


def describe(encoded: tree.Encoded, files: dict[str, FileRecord], data: str = "") -> Manifest:
    """Return the manifest of a state that has been written as `files`."""
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        arclight=_version(),
        torch=torch.__version__,
        step=encoded.step,
        epoch=encoded.epoch,
        files=files,
        entries={name: _summary(name, node, encoded) for name, node in encoded.entries.items()},
        tensors={
            file: {name: [_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
            for file, tensors in encoded.files.items()
        },
        data=data,
        processes=encoded.processes,
        meshes=encoded.meshes,
    )


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises CheckpointError if there is none or it is damaged.
    """
    try:
        text = (path / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_not_a_checkpoint(path)) from None
    except OSError as error:
        raise CheckpointError(f"{path / NAME} cannot be read: {error.strerror}") from error
    try:
        body = parse_json(text)
        digest = body.pop("digest")
        form, version = body.pop("format"), body.pop("version")
        if form != FORMAT:
            raise CheckpointError(f"{path / NAME} is of format {form!r}, not {FORMAT!r}: this is not a checkpoint")
        if version != VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of format version {version}; this Arclight reads version {VERSION}: "
                "load it with the Arclight that wrote it, or a newer one"
            )
        if digest != _digest({"format": form, "version": version, **body}):
            raise ValueError("its digest differs")
        return _checked(body)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / NAME} is damaged ({error}): {ADVICE}") from error


def _checked(body: dict[str, Any]) -> Manifest:
    """Build a manifest; raise ValueError for wrong types and files outside the folder."""
    files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
    entries = {name: EntrySummary(**entry) for name, entry in body.pop("entries").items()}
    manifest = Manifest(**body, files=files, entries=entries)
    parts: list[Any] = [manifest, *files.values(), *entries.values()]
    for part in parts:
        for name, hint in _types(type(part)).items():  # type: ignore[arg-type]
            if not _is_a(getattr(part, name), hint):
                raise ValueError(f"{name} is {getattr(part, name)!r:.60}")
    for name in (*manifest.files, *filter(None, [manifest.data])):
        if name in (".", "..") or not name.strip() or any(c in "/\\\0" for c in name):
            raise ValueError(f"{name!r} is not a plain file name")
    if STATE not in manifest.files:
        raise ValueError(f"it does not list {STATE}")
    if any(record.bytes < 0 for record in manifest.files.values()):
        raise ValueError("a file has less than no bytes")
    return manifest


@cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON is of the type that a field has."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, inner[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, inner[0]) for item in value)
    if origin is types.UnionType:
        return any(_is_a(value, member) for member in inner)
    return hint is Any or type(value) is hint


ADVICE = (
    "delete this checkpoint and load an earlier one; arclight.checkpoint.find_last(folder) finds the newest good one"
)


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is a folder that holds a checkpoint, complete or damaged."""
    try:
        with (path / NAME).open("rb") as file:
            return FORMAT.encode() in file.read(200) or (path / STATE).exists()
    except OSError:
        return False


def _why_not_a_checkpoint(path: Path) -> str:
    if not path.exists():
        return f"there is no checkpoint at {path}: nothing has that name"
    if path.is_file():
        return (
            f"{path} is a file, not a checkpoint folder: arclight.checkpoint.convert reads .pt, .ckpt and .safetensors"
        )
    inside = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    within = [name for name in inside if is_checkpoint(path / name)]
    hint = f"; did you mean {path / within[-1]}?" if within else ""
    return f"{path} is not a checkpoint: it has no {NAME} (it holds {', '.join(inside[:5]) or 'nothing'}){hint}"


def _summary(name: str, node: Any, encoded: tree.Encoded) -> EntrySummary:
    if isinstance(node, dict) and node.get("$") == "tensors":
        file, tensors = node["file"], list(encoded.files[node["file"]].values())
    else:
        names = _tensor_names(node)
        file = tree.REST if names else STATE
        tensors = [encoded.files[tree.REST][tensor] for tensor in sorted(names)]
    parts = _sharded_nodes(node)
    if parts:
        file = _pattern(set().union(*map(tree.files_of, parts)), file)
    for spread in {
        json.dumps(part): part for part in parts
    }.values():  # as full tensors on the meta device; tied ones once
        tensors.append(torch.empty(spread["shape"], dtype=getattr(torch, spread["dtype"]), device="meta"))
    return EntrySummary(
        file=file,
        tensors=len(tensors),
        elements=sum(tensor.numel() for tensor in tensors),
        bytes=sum(tensor.numel() * tensor.itemsize for tensor in tensors),
        dtypes=sorted({_name(tensor.dtype) for tensor in tensors}),
    )


def _pattern(files: set[str], otherwise: str) -> str:
    """Return one name for the files of several processes: `model-*-of-00004.safetensors`."""
    if len(files) < 2:
        return min(files, default=otherwise)
    head, _, tail = min(files).partition("-of-")
    return f"{head.rpartition('-')[0]}-*-of-{tail}"


def _sharded_nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict) and node.get("$") == "spread":
        return [node]
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [found for item in inner for found in _sharded_nodes(item)]


def _tensor_names(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_tensor_names, node))
    if not isinstance(node, dict):
        return set()
    if node.get("$") in ("tensor", "array"):
        return {node["name"]}
    return set().union(*map(_tensor_names, node.values()))


def _digest(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the manifest itself, to detect any flipped bit."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version() -> str:
    try:
        return metadata.version(distribution())
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a source folder without installation
