"""Save stages as one Hugging Face folder: each rank writes its tensors.

`Pipe.save` calls it on all ranks. Out: the folder that transformers and `weights.load` read, complete or not at all. Names of tensors are
the model's, whatever the number of stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from arclight.fabric import atomic_replace
from arclight.fabric.distributed.dtensor import is_dtensor
from arclight.fabric.distributed.sharding import full_tensor
from arclight.fabric.weight_files import INDEX, byte_count, shard_name, shards, write_index, write_shard
from arclight.parallel.pipeline.splitting.stage_tensors import stored_tensors

_OURS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class _Entry:
    """A tensor that a process has, known by the first of its names."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    held: bool
    """Whether the process has its values; else it is on the meta device."""


@torch.no_grad()
def save(
    stages: nn.Module | Iterable[nn.Module], folder: str | Path, *, model: nn.Module | None = None,
    max_shard_size: int | str = "5GB", group: dist.ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Save the weights of all stages as ``folder``: safetensors, index, config.json.

    There is an index if there are several files, and config.json if the model has one. Every process of ``group`` (by
    default of all) calls this with the stages that it has; those of others may be among them, on the meta device. A
    weight that several processes have is written by one of them, a tied one once under its first name. What is sharded
    over processes is gathered one tensor after the other. ``model``: where the ``config`` comes from, as models of
    transformers have it. max_shard_size: bytes of a file at most, a number or such as "500MB". All processes see the
    same files. The folder appears, or is replaced, when it is complete: whatever is there before stays whole until
    then.

    Raises FileExistsError if the folder has files that this does not write, ValueError for a tensor whose values no
    process has, and RuntimeError on all processes if one could not write.
    """
    folder = Path(folder)
    held: dict[str, torch.Tensor] = {}
    entries: dict[str, _Entry] = {}
    for stage in [stages] if isinstance(stages, nn.Module) else stages:
        for tensor, (name, *_) in stored_tensors(stage).items():
            if name in held and not tensor.is_meta and not _are_same(held[name], tensor):
                raise ValueError(
                    f"two stages of this process have different values of {name}: which to save is unclear"
                )
            entry = _Entry(str(tensor.dtype), tuple(tensor.shape), tensor.nbytes, not tensor.is_meta)
            if entry.held or name not in entries:
                entries[name] = entry
            if entry.held:
                held[name] = tensor
    everyones = _gather(entries, group)
    writers, largest = _share_out(everyones), byte_count(max_shard_size)
    rank = 0 if not dist.is_initialized() else dist.get_rank(group)
    files = _files(writers, everyones, largest)
    staging = _together(group, lambda: _prepare(folder) if rank == 0 else None)[0]
    try:
        _together(group, lambda: _write(files, held, rank, staging))
        _together(group, lambda: _finish(files, everyones, model, staging, folder) if rank == 0 else None)
    finally:
        if rank == 0:
            atomic_replace.discard(staging)


def _share_out(everyones: list[dict[str, _Entry]]) -> dict[str, int]:
    """Assign each tensor to the process that holds it and has least to write so far."""
    holders: dict[str, list[int]] = {}
    seen: dict[str, _Entry] = {}
    for rank, entries in enumerate(everyones):
        for name, entry in entries.items():
            first = seen.setdefault(name, entry)
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"{name} is {first.dtype} {first.shape} on one process and {entry.dtype} {entry.shape} on rank {rank}"
                )
            holders.setdefault(name, []).extend([rank] if entry.held else [])
    if lacking := [name for name, ranks in holders.items() if not ranks]:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ValueError(
            f"no process has values of {lacking[0]}{more}: every stage must be materialized by the process that saves it"
        )
    load, writers = [0] * len(everyones), dict[str, int]()
    for name, ranks in holders.items():
        writers[name] = min(ranks, key=lambda rank: (load[rank], rank))
        load[writers[name]] += seen[name].bytes
    return writers


@dataclass(frozen=True)
class _File:
    name: str
    writer: int
    tensors: tuple[str, ...]


def _files(writers: dict[str, int], everyones: list[dict[str, _Entry]], limit: int) -> list[_File]:
    found: list[tuple[int, tuple[str, ...]]] = []
    for rank, entries in enumerate(everyones):
        names = [name for name, writer in writers.items() if writer == rank]
        parts = shards([entries[name].bytes for name in names], limit) if names else ()
        found += [(rank, tuple(names[place] for place in part)) for part in parts]
    return [_File(shard_name(number, len(found)), rank, names) for number, (rank, names) in enumerate(found)]


def _prepare(folder: Path) -> Path:
    """Return a folder to write into; remove what killed saves left beside it."""
    atomic_replace.sweep(folder.parent)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: name a folder")
    others = [
        entry.name
        for entry in (folder.iterdir() if folder.is_dir() else ())
        if entry.name not in _OURS and not entry.name.endswith((".safetensors", INDEX))
    ]
    if others:
        raise FileExistsError(
            f"{folder} has {others[0]}, which would be lost: name another folder or move what is there"
        )
    return atomic_replace.make_staging(folder)


def _write(files: list[_File], held: dict[str, torch.Tensor], rank: int, staging: Path) -> None:
    """Write this process's files; take part in gathering what is sharded, for any writer."""
    failed: Exception | None = None
    for file in files:
        out = {}
        for name in file.tensors:
            if name in held and (file.writer == rank or is_dtensor(held[name])):
                whole = full_tensor(held[name]).detach()
                if file.writer == rank and failed is None:
                    out[name] = _alone(whole)
        if file.writer == rank and failed is None:
            try:
                write_shard(out, staging / file.name)
            except Exception as error:  # raised below: others wait for sharded tensors to be gathered
                failed = error
    if failed is not None:
        raise failed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense CPU tensor with memory of its own, as safetensors needs."""
    made = tensor.to("cpu").contiguous()
    return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (not (is_dtensor(one) or is_dtensor(other)) and torch.equal(one, other))


def _finish(
    files: list[_File], everyones: list[dict[str, _Entry]], model: nn.Module | None, staging: Path, folder: Path
) -> None:
    if gone := [file.name for file in files if not (staging / file.name).is_file()]:
        raise FileNotFoundError(
            f"{gone[0]}, which another process wrote, is not to be seen in {staging}: choose a folder that all processes share"
        )
    if len(files) > 1:
        total = sum(everyones[file.writer][name].bytes for file in files for name in file.tensors)
        write_index({name: file.name for file in files for name in file.tensors}, total, staging)
    for name in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, name, None))
        if callable(getattr(config, "save_pretrained", None)):
            if name == "config":
                config.architectures, config.dtype = [type(model).__name__], _dtype(files, everyones)
            config.save_pretrained(staging)
    atomic_replace.replace_folder(staging, folder)


def _dtype(files: list[_File], everyones: list[dict[str, _Entry]]) -> str | None:
    """Return the type of the first tensor of a floating type."""
    entries = (everyones[file.writer][name] for file in files for name in file.tensors)
    return next((e.dtype.removeprefix("torch.") for e in entries if "float" in e.dtype), None)


# -- processes -----------------------------------------------------------------------------------------------------


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather what each process of the group has, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _together(group: dist.ProcessGroup | None, work: Callable[[], Any]) -> list[Any]:
    """Run ``work`` on each process, and gather its results.

    If it fails on one all raise, so that none waits for another.
    """
    error: Exception | None = None
    result = None
    try:
        result = work()
    except Exception as raised:  # told to all others, and raised again here
        error = raised
    outcomes = _gather((result, f"{type(error).__name__}: {error}" if error is not None else None), group)
    if error is not None:
        raise error
    if failed := [(rank, problem) for rank, (_, problem) in enumerate(outcomes) if problem is not None]:
        raise RuntimeError(f"rank {failed[0][0]} could not save its part, so nothing was saved: {failed[0][1]}")
    return [result for result, _ in outcomes]
