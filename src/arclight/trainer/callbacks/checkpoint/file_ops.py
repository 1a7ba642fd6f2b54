"""Name checkpoints; move, link and delete them without ever leaving half of one behind.

`model_checkpoint`, `history` and `on_exception_checkpoint` name and delete by it; ``checkpoint.resume`` and ``loop.signals`` ask when a
checkpoint was written. Local paths and remote URLs come in. A crash at any line must leave whole checkpoints only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from arclight.checkpoint import CheckpointError, files, remote
from arclight.checkpoint.manifest import read_manifest
from arclight.checkpoint.remote import is_remote, to_path
from arclight.checkpoint.retention import copy
from arclight.checkpoint.sharded.writer import capture_error
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies import Strategy
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def format_name(
    template: str,
    values: Mapping[str, Any],
    auto_insert_metric_name: bool = True,
    equals: str = "=",
) -> str:
    """Fill in a file name's ``{name}`` and ``{name:format}`` fields from ``values``.

    A name without a value becomes 0.

    With ``auto_insert_metric_name`` the value is preceded by ``name=``, a ``/`` in the name becoming ``_`` so that
    ``{val/loss:.3f}`` makes a file name and not a folder. Raises MisconfigurationError for a format that does not fit the value.
    """

    def fill(field: re.Match[str]) -> str:
        name, spec = field[1], field[2] or ""
        value = values.get(name, 0)
        value = value.item() if hasattr(value, "item") else value
        try:
            text = format(value, spec)
        except (ValueError, TypeError) as error:
            raise MisconfigurationError(
                f"ModelCheckpoint(filename={template!r}): {field[0]} cannot show {name} = {value!r}: {error}",
            ) from error
        return f"{name.replace('/', '_')}{equals}{text}" if auto_insert_metric_name else text

    return _FIELD.sub(fill, template)


def full_path(path: str | Path) -> str:
    """Return a local path absolute, with ``~`` and links resolved; leave a remote URL as it is."""
    path = to_path(path)
    return str(path) if is_remote(path) else os.path.realpath(os.path.expanduser(path))


def is_within(path: str | Path, folder: str) -> bool:
    """Return True if ``path`` is below ``folder``."""
    if "://" in folder or "://" in str(path):
        return str(path).startswith(f"{folder}/")
    return Path(path).is_relative_to(folder)


def is_taken(path: str) -> bool:
    """Return True if a new checkpoint of that name would replace something.

    At a remote URL, the empty remains of an interrupted save do not count.
    """
    found = to_path(path)
    return files.is_there(found) and not (is_remote(found) and files.is_empty(found))


def written_at(path: str | Path, follow: bool = True) -> int:
    """Return the time a checkpoint was written, in nanoseconds; 0 if a remote one does not say."""
    found = to_path(path)
    if not is_remote(found):
        return (found.stat() if follow else found.lstat()).st_mtime_ns
    try:
        return int(datetime.fromisoformat(read_manifest(found).created).timestamp() * 1_000_000) * 1000
    except CheckpointError:
        return 0


def check_folder(strategy: Strategy, io: CheckpointIO, folder: str, save_last: Any, warn: bool) -> None:
    """Check the checkpoint folder and warn if it is not empty; every rank calls this.

    Raises MisconfigurationError for a folder that cannot hold such checkpoints, and CheckpointError for a URL that cannot
    be written to, before any training is done in vain.
    """
    if "://" in folder:
        _check_address(strategy, io, folder, save_last)
    if warn and strategy.is_global_zero and (found := to_path(folder)).is_dir() and any(found.iterdir()):
        rank_zero_warn(f"Checkpoint directory {folder} exists and is not empty: names in use get -v1, -v2, ...")


def _check_address(strategy: Strategy, io: CheckpointIO, folder: str, save_last: Any) -> None:
    if save_last == "link":
        raise MisconfigurationError(
            f"`ModelCheckpoint(save_last='link', dirpath={folder!r})` is only supported for local file paths; save_last=True "
            "keeps a copy there"
        )
    if isinstance(getattr(io, "wrapped", io), TorchCheckpointIO):
        raise MisconfigurationError(
            f"`ModelCheckpoint(dirpath={folder!r})`: one file of torch.save is only supported for local file paths; checkpoint folders, "
            "as FolderCheckpointIO writes them, can lie at an address"
        )
    problem = capture_error(lambda: remote.check_writable(folder))[1] if strategy.local_rank == 0 else None
    for rank, problem_there in enumerate(strategy.all_gather_object(problem)):
        if problem_there is not None:
            raise CheckpointError(f"no checkpoint could be written to {folder} by rank {rank}: {problem_there}")


def find_checkpoints(folder: str | None, name: str, extension: str) -> set[str]:
    """Find the checkpoints in ``folder`` under ``name``, in any of its versions."""
    if folder is None or not to_path(folder).is_dir():
        return set()
    pattern = re.compile(re.escape(name) + r"(-v\d+)?" + re.escape(extension))
    return {str(entry) for entry in to_path(folder).iterdir() if pattern.fullmatch(entry.name)}


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, by hard links if the file system has them."""
    if is_remote(target):
        copy(source, target)
        return
    if source.is_dir():
        staging = files.make_staging(target)
        for file in source.iterdir():  # a checkpoint has no folders in it
            files.link_or_copy(file, staging / file.name)
    else:
        staging = files.temporary_file(target)
        files.link_or_copy(source, staging)
    files.publish(staging, target)


def link_checkpoint(source: Path, target: Path) -> None:
    """Link ``target`` to ``source`` by a relative symbolic link, so that both can be moved.

    Copies it instead if the file system or the system's rules do not allow symbolic links.
    """
    link = files.temporary_file(target)
    try:
        link.symlink_to(os.path.relpath(source, target.parent))
    except OSError:
        copy_checkpoint(source, target)
    else:
        files.publish(link, target)


def remove_checkpoint(path: str | Path, io: CheckpointIO) -> None:
    """Remove what ``io`` saved at ``path``; of a link the link alone, which is no plugin's.

    It does not wait for other saves of an AsyncCheckpointIO.
    """
    place = to_path(path)
    if place.is_symlink():
        place.unlink()
        return
    plugin = io.wrapped if isinstance(io, AsyncCheckpointIO) else io
    plugin.remove_checkpoint(path)
