"""Saving tensors that are spread over processes: each writes its shares, rank 0 everything else.

The outcome is a checkpoint as any other, which opens on any number of processes: `arclight.checkpoint.load` puts the
shares together. All processes must see the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.checkpoint import files, tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.manifest import NAME, STATE, FileRecord, describe, is_checkpoint
from arclight.checkpoint.tensorfile import write_tensors

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a share lies in its tensor: offset and shape."""


def save_shares(path: str | Path, state: Mapping[str, Any], processes: Strategy) -> Path:
    """Write `state` as the checkpoint folder `path`, as `arclight.checkpoint.save` does; every process must call this.

    Shares that several processes hold alike are written once. Raises CheckpointError on every process where any of them
    could not write.
    """
    path = Path(path)
    tensors: dict[str, Any] = {}
    _find(state, (), tensors)
    mine = {name: _place(tensor) for name, tensor in tensors.items()}
    everyones: list[dict[str, _Place]] = processes.all_gather_object(mine)
    writers = _writers(everyones)
    staging = Path(_agreed(processes, lambda: str(_staging(path))))
    own: dict[str, dict[str, torch.Tensor]] = {}
    for name, place in mine.items():
        if writers.get((name, place)) == processes.global_rank:
            entry, _, inner = name.partition(".")
            file = _file(entry, processes.global_rank, processes.world_size)
            own.setdefault(file, {})[inner] = tensors[name].to_local().detach()
    records, problem = _attempt(lambda: {name: _write(staging / name, group) for name, group in own.items()})
    outcomes = processes.all_gather_object((records, problem))
    _raise_first(path, [problem for _, problem in outcomes], staging if processes.is_global_zero else None)
    written = {name: record for records, _ in outcomes for name, record in records.items()}

    def finish() -> None:
        encoded = tree.encode(_with_places(state, (), tensors, writers, processes.world_size))
        records = dict(written) | {name: _write(staging / name, group) for name, group in encoded.files.items()}
        with files.create(staging / STATE) as file:
            file.write(json.dumps(encoded.entries, allow_nan=False).encode())
        records[STATE] = FileRecord(sha256=file.sha256, bytes=file.bytes)
        with files.create(staging / NAME) as file:
            file.write(describe(encoded, records).to_json().encode())
        files.publish(staging, path)

    problem = _attempt(finish)[1] if processes.is_global_zero else None
    _raise_first(path, [processes.broadcast(problem)], staging if processes.is_global_zero else None)
    return path


def _is_spread(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "to_local")


def _find(value: Any, path: tuple[str, ...], found: dict[str, Any]) -> None:
    """The spread tensors below `value` by their path."""
    if _is_spread(value):
        found[".".join(path)] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _find(item, (*path, str(key)), found)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _find(item, (*path, str(number)), found)


def _place(tensor: Any) -> _Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)


def _writers(everyones: list[dict[str, _Place]]) -> dict[tuple[str, _Place], int]:
    """For each share that has elements, the first rank that holds it."""
    writers: dict[tuple[str, _Place], int] = {}
    for rank, places in enumerate(everyones):
        for name, place in places.items():
            if 0 not in place[1]:
                writers.setdefault((name, place), rank)
    return writers


def _file(entry: str, rank: int, world_size: int) -> str:
    safe = "".join(c if c.isalnum() or c in "_-" else "_" for c in entry)
    return f"{safe}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def _with_places(
    value: Any, path: tuple[str, ...], tensors: dict[str, Any], writers: dict[tuple[str, _Place], int], world_size: int
) -> Any:
    """`value` with, in the place of each spread tensor, where its shares are."""
    if _is_spread(value):
        name = ".".join(path)
        shares = [
            (_file(path[0], rank, world_size), name.partition(".")[2], offset)
            for (owner, (offset, _)), rank in writers.items()
            if owner == name
        ]
        return tree.Spread(str(value.dtype).removeprefix("torch."), tuple(value.shape), shares)
    if isinstance(value, Mapping):
        return {key: _with_places(item, (*path, str(key)), tensors, writers, world_size) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_places(item, (*path, str(n)), tensors, writers, world_size) for n, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _staging(path: Path) -> Path:
    if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not a checkpoint: choose another name, it is left as it is")
    files.sweep(path.parent)
    return files.make_staging(path)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    with files.create(path) as file:
        write_tensors(file, tensors)
    return FileRecord(sha256=file.sha256, bytes=file.bytes)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `function` gives, or why it could not: others wait for the answer, so nothing may be raised yet."""
    try:
        return function(), None
    except (OSError, CheckpointError) as error:
        return {}, str(error)


def _agreed(processes: Strategy, function: Callable[[], str]) -> str:
    """What `function` gives on rank 0, on every rank."""
    given: tuple[Any, str | None] = _attempt(function) if processes.is_global_zero else ("", None)
    value, problem = processes.broadcast(given)
    if problem is not None:
        raise CheckpointError(problem)
    return str(value)


def _raise_first(path: Path, problems: list[str | None], staging: Path | None) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            if staging is not None:
                files.discard(staging)
            where = f" by rank {rank}" if len(problems) > 1 else ""
            raise CheckpointError(
                f"checkpoint {path} could not be written{where}: {problem}; what was there before is intact. All processes "
                "need to see the same folder"
            )
