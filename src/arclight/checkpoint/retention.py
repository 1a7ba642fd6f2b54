"""Find the last or best checkpoint of a folder; prune, remove and copy checkpoints.

`find_last`, `prune` and `remove` are public (``arclight.checkpoint``). `ModelCheckpoint` calls `copy` for ``last`` at remote URLs,
which have no links; ``cli.runs`` and ``vision.tasks.distillation`` call `recorded_best` to open a run's best checkpoint.

Links are never followed, and only checkpoints, links and leftovers of killed saves are removed. Both rules must stay, since folders hold
users' files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.checkpoint import files
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.manifest import is_checkpoint, read_manifest
from arclight.checkpoint.remote import to_path
from arclight.checkpoint.store import is_complete, load, verify

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


def find_last(folder: str | Path, processes: Strategy | None = None) -> Path | None:
    """Return the checkpoint in `folder` with the highest step whose files are all intact.

    Of equal steps it is the latest written; None if none is intact. First removes what killed saves left in `folder`. Warns, with the
    reason, of each newer one that is damaged, and of those whose manifest is unreadable, whatever their age. Links are not followed:
    what they point to is found under its own name or lies elsewhere. With `processes`, all of which must call this, each reads a part of
    the files.
    """
    folder, candidates = to_path(folder), list[Path]()
    if processes is None or processes.is_global_zero:
        files.sweep(folder)
        ordered, unreadable = _by_age(folder)
        candidates = [*unreadable, *reversed(ordered)]
    for path in candidates if processes is None else processes.broadcast(candidates):
        problems = verify(path, processes)
        if not problems:
            return to_path(path)
        warnings.warn(f"skipping a damaged checkpoint: {problems[0]}", stacklevel=2)
    return None


def find_recorded(recorded: Path, folder: Path) -> Path | None:
    """Find a checkpoint that a run recorded, in ``folder`` or where it was written."""
    return next((place for place in (folder / recorded.name, recorded) if place.exists()), None)


def recorded_best(checkpoint: str | Path) -> tuple[Path | None, str]:
    """Return the best checkpoint by the record in `checkpoint`, and the monitored value's name.

    None and "" if nothing was ranked: a callback without a monitored value records the newest of its own checkpoints, and another
    callback's may be newer. Each checkpoint of a run has the record of itself and those before it, so the newest has the whole record.
    """
    checkpoint = to_path(checkpoint)
    if "callbacks" not in read_manifest(checkpoint).entries:
        return None, ""
    states: dict[str, dict[str, Any]] = load(checkpoint, only=["callbacks"])["callbacks"]
    for state in states.values():
        best, monitor = state.get("best_model_path"), state.get("monitor")
        if best and monitor:
            return Path(best), str(monitor)
    return None, ""


def prune(folder: str | Path, *, keep: int, protect: Iterable[str | Path] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints of `folder`, and what killed saves left.

    Those that are unreadable or cut off count as oldest. protect: paths that are kept whatever their age, and do not count. Returns the
    checkpoints removed, oldest first. No other folder is touched. Raises ValueError for a negative `keep`.
    """
    if keep < 0:
        raise ValueError(f"keep={keep}: the number of checkpoints to keep cannot be negative")
    folder = to_path(folder)
    files.sweep(folder)
    protected = {to_path(path).resolve() for path in protect}
    ordered, unreadable = _by_age(folder)
    ordered = [path for path in ordered if path.resolve() not in protected]
    unreadable = [path for path in unreadable if path.resolve() not in protected]
    doomed = _all_but(keep, ordered, unreadable)
    for path in doomed:
        remove(path)
    return doomed


def _all_but(keep: int, ordered: list[Path], unreadable: list[Path]) -> list[Path]:
    """List the checkpoints to remove so that `keep` stay, unreadable and cut-off ones first."""
    older, kept = list(ordered), list[Path]()
    unreadable = list(unreadable)
    while older and len(kept) < keep:
        newest = older.pop()
        if is_complete(newest, read_manifest(newest)):
            kept.insert(0, newest)
        else:
            unreadable.append(newest)
    candidates = [*unreadable, *older, *kept]
    return candidates[: max(0, len(candidates) - keep)]


def remove(path: str | Path) -> None:
    """Remove one checkpoint, or a link; at no time is half of it there under its name.

    A link may point to anything. Raises CheckpointError for anything else, which is left as it is.
    """
    path = to_path(path)
    if path.is_symlink():
        path.unlink()
        return
    if not is_checkpoint(path):
        raise CheckpointError(f"{path} is not a checkpoint: it is left as it is")
    files.retire(path)


def copy(source: str | Path, target: str | Path) -> None:
    """Copy the checkpoint at `source` to `target`, both in one remote file system.

    The file system copies by itself if it can. What was at `target` stays complete until the copy is. Raises CheckpointError if it
    could not be copied.
    """
    source, target = to_path(source), to_path(target)
    manifest = read_manifest(source)
    staging = files.make_staging(target)
    try:
        for name in manifest.files:
            manifest.at(source, name).copy_to(staging / name)  # type: ignore[attr-defined]
        (staging / files.MANIFEST).write_bytes(replace(manifest, data=files.data_folder(staging)).to_json().encode())
        files.publish(staging, target)
    except OSError as error:
        raise CheckpointError(f"{source} could not be copied to {target}: {error.strerror or error}") from error
    finally:
        files.discard(staging)


def _by_age(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in `folder`, oldest first, and those with unreadable manifests."""
    found: list[tuple[int, str, Path]] = []
    unreadable = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.is_symlink() or not is_checkpoint(path):
            continue
        try:
            manifest = read_manifest(path)
            found.append((-1 if manifest.step is None else manifest.step, manifest.created, path))
        except CheckpointError:
            unreadable.append(path)
    return [path for _, _, path in sorted(found)], unreadable
