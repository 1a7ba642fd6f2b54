"""Names of checkpoints, and moving them about without ever leaving half a one behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight import checkpoint
from arclight.checkpoint import files
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def format_name(
    template: str,
    values: Mapping[str, Any],
    auto_insert_metric_name: bool = True,
    equals: str = "=",
) -> str:
    """``template`` with each ``{name}`` or ``{name:format}`` replaced by its value (0 where it has none).

    With ``auto_insert_metric_name`` the value is preceded by ``name=``, a ``/`` in the name becoming ``_`` so that
    ``{val/loss:.3f}`` makes a file name and not a folder. Raises ValueError for a format that does not fit the value.
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
    """A local path from the root on, links followed and ``~`` put out; a remote one as it is."""
    return str(path) if is_remote(path) else os.path.realpath(os.path.expanduser(path))


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` names something beyond this machine's file systems, such as ``s3://bucket/runs``."""
    return "://" in str(path) and not str(path).startswith("file://")


def check_folder(trainer: Trainer, folder: str, save_last: Any, warn: bool) -> None:
    """Raises MisconfigurationError for a folder that cannot hold checkpoints, and warns of one that holds something."""
    if is_remote(folder):
        what = "save_last='link', " if save_last == "link" else ""
        raise MisconfigurationError(
            f"`ModelCheckpoint({what}dirpath={folder!r})` is only supported for local file paths"
        )
    if warn and trainer.is_global_zero and os.path.isdir(folder) and os.listdir(folder):
        rank_zero_warn(f"Checkpoint directory {folder} exists and is not empty: names in use get -v1, -v2, ...")


def find_checkpoints(folder: str | None, name: str, extension: str) -> set[str]:
    """What is in ``folder`` under ``name``, in any of its versions."""
    if folder is None or not os.path.isdir(folder):
        return set()
    pattern = re.compile(re.escape(name) + r"(-v\d+)?" + re.escape(extension))
    return {os.path.join(folder, entry) for entry in os.listdir(folder) if pattern.fullmatch(entry)}


def copy_checkpoint(source: Path, target: Path) -> None:
    """Make ``target`` a copy of ``source`` that costs no space: of hard links, where the file system has them."""
    if source.is_dir():
        staging = files.make_staging(target)
        for file in source.iterdir():  # a checkpoint has no folders in it
            link_or_copy(file, staging / file.name)
    else:
        staging = files.temporary_file(target)
        link_or_copy(source, staging)
    files.publish(staging, target)


def link_checkpoint(source: Path, target: Path) -> None:
    """Make ``target`` a symbolic link to ``source``, relative so that both can be moved together.

    A copy, where the file system or the system's rules have no such links.
    """
    link = files.temporary_file(target)
    try:
        link.symlink_to(os.path.relpath(source, target.parent))
    except OSError:
        copy_checkpoint(source, target)
    else:
        files.publish(link, target)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, be it a file, a folder or a link to one; what is not there, and other folders, stay as they are."""
    if path.is_file() and not path.is_symlink():
        path.unlink()
    elif os.path.lexists(path):
        checkpoint.remove(path)
