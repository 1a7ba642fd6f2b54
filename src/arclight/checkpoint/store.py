"""Save, load and verify a checkpoint in one process.

`save`, `load` and `verify` are public (``arclight.checkpoint``): the Trainer's checkpoint IO, the commands and federated rounds call them.
`async_saver`, `conversion`, `retention` and ``sharded.reader`` call the parts. What is written is described in `manifest`, `tree` and
`tensorfile`, and must stay readable; its steps are in an order (see `files`) that a kill at any time survives.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from arclight.checkpoint import files, filters, remote, tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.filters import find_nan, select_entries
from arclight.checkpoint.manifest import (
    ADVICE,
    NAME,
    STATE,
    FileRecord,
    Manifest,
    describe,
    is_checkpoint,
    read_manifest,
)
from arclight.checkpoint.remote import to_path
from arclight.checkpoint.tensorfile import parse_json, read_tensors, write_tensors

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

T = TypeVar("T")

_ATTEMPTS = 20
"""Attempts to read a checkpoint that others are replacing."""

_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that malformed values of a file can cause. RuntimeErrors other than RecursionError come from the device and are passed on."""


def save(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Save `state` as the checkpoint folder `path`, atomically.

    state: a dict of text keys to trees of tensors, arrays, numbers, text, bytes, paths, ``None``, and lists, tuples,
    sets and dicts (with keys of any such plain value). A top-level entry that is a flat dict of names to tensors, such
    as a model's state dict, becomes a safetensors file of its own under these names. Tensors that are the same view of
    the same memory within an entry are stored once and come back as one. Subclasses of dict, list and tuple come back
    as these, an Enum member as its value, a parameter as a tensor.

    `path` may be a URL that fsspec knows, such as ``s3://bucket/name``.
    A checkpoint that is already at `path` stays complete until the new one replaces it; anything else there is refused.
    Raises CheckpointError naming the key path of what cannot be kept, or the file that could not be written and why.
    """
    path = to_path(path)
    write(path, tree.encode(state))
    return path


def write(path: Path, encoded: tree.Encoded) -> None:
    """Write an encoded state."""
    staging = None
    try:
        if files.is_there(path) and not is_checkpoint(path) and not files.is_empty(path):
            raise CheckpointError(f"{path} exists and is not a checkpoint: choose another name, it is left as it is")
        files.sweep(path.parent)
        staging = files.make_staging(path)
        records = {name: _write_file(staging / name, write_tensors, group) for name, group in encoded.files.items()}
        text = json.dumps(encoded.entries, allow_nan=False).encode()
        records[STATE] = _write_file(staging / STATE, files.HashedFile.write, text)
        _write_file(
            staging / NAME,
            files.HashedFile.write,
            describe(encoded, records, files.data_folder(staging)).to_json().encode(),
        )
        files.publish(staging, path)
    except OSError as error:
        raise _not_written(path, encoded, error) from error
    finally:
        if staging is not None:
            files.discard(staging)


def load(
    path: str | Path,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    map_location: str | torch.device = "cpu",
    verify: bool = True,
    refuse_nan: bool = False,
) -> dict[str, Any]:
    """Return the state that was saved at `path`, equal bit for bit.

    only, exclude: what is wanted, default all, and what is not: a pattern or several for dotted names, such as `model`,
    `model.head.*` or `*.exp_avg`. refuse_nan: raise for NaN in the entry `model`. map_location: device of the tensors (arrays stay on the
    CPU). verify: compare the SHA-256 of every file that is read.
    Raises CheckpointError that names the file and what to do if anything is missing, damaged or of another version.
    """
    path = to_path(path)
    if not remote.is_remote(path) and not path.exists() and path.parent.is_dir():
        files.sweep(path.parent)  # a process killed between two renames has left it beside

    def read(manifest: Manifest) -> dict[str, Any]:
        entries = read_entries(path, manifest, verify)
        with fitting(path):
            entries = select_entries(path, entries, only, exclude)
            needed = tree.tensors_of(entries)
        loaded = {
            name: read_file(path, name, manifest, verify, partial(_wanted, name, needed, map_location))
            for name in sorted({file for file, _ in needed})
        }
        with fitting(path):
            return tree.decode(entries, loaded)

    _, state = read_whole(path, read, verify)
    if refuse_nan and isinstance(state.get("model"), dict):
        filters.refuse_nan(path, find_nan(state["model"]))
    return state


def read_whole(path: Path, read: Callable[[Manifest], T], verified: bool) -> tuple[Manifest, T]:
    """Read a checkpoint by its manifest, again if another one replaces it meanwhile.

    verified: whether `read` compares the hashes of all that it reads, and so never mixes two checkpoints.
    """
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(path)
        try:
            found = read(manifest)
        except CheckpointError:
            if read_manifest(path) == manifest:
                raise
            continue
        if verified or read_manifest(path) == manifest:
            return manifest, found
    raise CheckpointError(
        f"{path} is replaced faster than it can be read: load it while nobody writes it, or load a copy"
    )


def read_entries(path: Path, manifest: Manifest, verify: bool = True) -> dict[str, Any]:
    """Return the encoded entries of a checkpoint."""
    entries = read_file(path, STATE, manifest, verify, lambda file, size: parse_json(file.read(size)))
    if not isinstance(entries, dict):
        raise _damaged(path / STATE, f"it holds a {type(entries).__name__} instead of entries")
    return entries


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Raise CheckpointError for any error in a checkpoint's encoded entries."""
    try:
        yield
    except CheckpointError:
        raise
    except _WRONG as error:
        raise CheckpointError(f"{path / STATE} does not fit the tensor files ({error!r}): {ADVICE}") from error


def _wanted(
    name: str, needed: set[tuple[str, str]], device: str | torch.device, file: files.HashedFile, size: int
) -> dict[str, torch.Tensor]:
    return read_tensors(file, size, device, lambda tensor: (name, tensor) in needed)


def verify(path: str | Path, processes: Strategy | None = None) -> list[str]:
    """List all that is wrong with a checkpoint, a sentence each; empty for an intact one.

    Empty for an intact one. Every file is read and its SHA-256 compared. With `processes`, all of which must call this, each reads its part
    of the files, and all get the same answer.
    """
    if processes is not None and processes.world_size > 1:
        found = processes.all_gather_object(_problems(to_path(path), processes.global_rank, processes.world_size))
        return list(dict.fromkeys(problem for problems in found for problem in problems))
    return _problems(to_path(path))


def _problems(path: Path, first: int = 0, step: int = 1) -> list[str]:
    """List the problems of every `step`-th file, largest first."""
    try:
        for _ in range(_ATTEMPTS):
            manifest = read_manifest(path)
            problems = _problems_by(manifest, path, first, step)
            if not problems or read_manifest(path) == manifest:
                break  # else another has taken its place meanwhile
    except CheckpointError as error:
        return [str(error)]
    return problems


def _problems_by(manifest: Manifest, path: Path, first: int, step: int) -> list[str]:
    problems = []
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))[first::step]:
        try:
            _check_size(manifest.at(path, name), record)
            if files.hash_file(manifest.at(path, name)) != record.sha256:
                raise _damaged(path / name, "its SHA-256 differs from the manifest")
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path / name} cannot be read: {error.strerror}")
    return problems


def _write_file(path: Path, writer: Callable[[files.HashedFile, Any], None], content: Any) -> FileRecord:
    with files.create(path) as file:
        writer(file, content)
    return FileRecord(sha256=file.sha256, bytes=file.bytes)


def read_file(
    path: Path, name: str, manifest: Manifest, verify: bool, reader: Callable[[files.HashedFile, int], Any]
) -> Any:
    record = manifest.files.get(name)
    if record is None:
        raise CheckpointError(f"{path / NAME} does not list {name}: {ADVICE}")
    _check_size(manifest.at(path, name), record)
    try:
        with files.open_hashed(manifest.at(path, name)) as file:
            content = reader(file, record.bytes)
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
    except (*_WRONG, EOFError) as error:
        raise _damaged(path / name, str(error)) from error
    if verify and file.sha256 != record.sha256:
        raise _damaged(path / name, "its SHA-256 differs from the manifest")
    return content


def is_complete(path: Path, manifest: Manifest) -> bool:
    """Return whether every file is there in its size; their content is not read."""
    try:
        for name, record in manifest.files.items():
            _check_size(manifest.at(path, name), record)
    except CheckpointError:
        return False
    return True


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {ADVICE}") from None
    if size != record.bytes:
        raise _damaged(path, f"it has {size:,} bytes instead of {record.bytes:,}")


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {why}; {ADVICE}")


def _not_written(path: Path, encoded: tree.Encoded, error: OSError) -> CheckpointError:
    if remote.is_explained(error):
        return CheckpointError(
            f"checkpoint {path} could not be written: {error.strerror or error}; what was there before is intact"
        )
    size = sum(tensor.numel() * tensor.itemsize for group in encoded.files.values() for tensor in group.values())
    megabytes = f"{max(1, math.ceil(size / 1e6)):,} MB"
    advice = {
        errno.ENOSPC: f"free at least {megabytes} on that disk",
        errno.EDQUOT: f"free at least {megabytes} of your quota",
        errno.EFBIG: f"raise the limit on file sizes (ulimit -f) above {megabytes}",
    }.get(error.errno or 0, "choose a folder that you may write to")
    before = "the checkpoint that was there before is intact" if is_checkpoint(path) else "nothing was left there"
    return CheckpointError(f"checkpoint {path} could not be written: {error.strerror or error}; {before}; {advice}")
