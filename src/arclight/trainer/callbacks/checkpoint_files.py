"""Names of checkpoints, and moving them about without ever leaving half a one behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def format_name(template: str, values: Mapping[str, Any], auto_insert_metric_name: bool = True, equals: str = "=") -> str:
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
            raise ValueError(f"ModelCheckpoint(filename={template!r}): {field[0]} cannot show {name} = {value!r}: {error}") from error
        return f"{name.replace('/', '_')}{equals}{text}" if auto_insert_metric_name else text

    return _FIELD.sub(fill, template)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Make ``target`` a copy of ``source`` that costs no space: its files are hard links where the file system has them."""
    aside = hidden(target, "tmp")
    remove_tree(aside)
    if source.is_dir():
        shutil.copytree(source, aside, copy_function=link_or_copy)
    else:
        link_or_copy(str(source), str(aside))
    replace_with(target, aside)


def link_checkpoint(source: Path, target: Path) -> None:
    """Make ``target`` a symbolic link to ``source``, relative so that both can be moved together."""
    aside = hidden(target, "tmp")
    remove_tree(aside)
    aside.symlink_to(os.path.relpath(source, target.parent))
    replace_with(target, aside)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: first its name, in one step, then its files."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = hidden(path, "old")
    remove_tree(aside)
    path.rename(aside)
    shutil.rmtree(aside)


def replace_with(target: Path, replacement: Path) -> None:
    """Put ``replacement`` where ``target`` is. A folder cannot be replaced in one step, so ``target`` steps aside for an instant."""
    if replacement.is_dir() and not replacement.is_symlink() or (target.is_dir() and not target.is_symlink()):
        if target.exists() or target.is_symlink():
            aside = hidden(target, "old")
            remove_tree(aside)
            target.rename(aside)
            replacement.rename(target)
            remove_tree(aside)
            return
    os.replace(replacement, target)


def hidden(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{ending}")


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
