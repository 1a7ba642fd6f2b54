"""Load one stage's weights from safetensors files, reading only its tensors.

`Pipe.load` calls this on each rank. In: a file or folder of safetensors, full tensors by the model's names; out: filled parameters and
a `LoadReport`. A tensor of another stage is never read, so that memory stays that of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.fabric.distributed.sharding import shard_like
from arclight.fabric.weight_files import WeightFiles
from arclight.parallel.pipeline.splitting.stage_tensors import like, named_tensors, replace_tensors, stored_tensors
from arclight.parallel.pipeline.weights.initialize import initialize_stages

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that are converted into each other. Those of 8 bits are not: they have scales beside them."""


@dataclass(frozen=True)
class LoadReport:
    """Report on the weights loaded for some stages."""

    names: dict[str, str]
    """Name of each tensor in the files, by the first of its names."""
    files: tuple[Path, ...]
    """The files that were opened."""
    bytes: int
    """Bytes of the stages' tensors on this process."""
    initialized: tuple[str, ...] = ()
    """Buffers that no file holds, which their modules computed again."""


@torch.no_grad()
def load(
    stages: nn.Module | Iterable[nn.Module], path: str | Path, *, model: nn.Module | None = None,
    device: str | torch.device = "cpu", dtype: torch.dtype | None = None, prefix: str | None = None,
    rename: Callable[[str], str] | None = None, mapped: bool = True,
) -> LoadReport:  # fmt: skip
    """Load tensors of ``stages`` from safetensors: a file, its index, or a Hugging Face folder.

    What is on the meta device gets memory on ``device``; what has memory is filled where it is; of what is sharded over processes
    each reads its share. A tensor is looked up by its names in the model (several if weights are tied), then below a
    prefix that files or stages alone have ("model", "transformer"): the one given, or the only one with which everything is found.
    rename: from a name in the model to the one in the files, if they were written for a model with other names.
    ``dtype``: what tensors of floating types become, by default what they are in the stages; other types are never converted.
    mapped: tensors on the CPU whose type fits stay in the file until they are used, and what is changed then is changed in memory
    only; else they are copied, one after the other. Buffers that no file holds are computed as :func:`initialize_stages` does, ``model`` as there.

    Raises ValueError, naming file and tensor, for what is missing, is there twice and differs, or has another shape or type;
    FileNotFoundError for files that are not there; PlanError as :func:`initialize_stages`. Whatever is raised, no stage has changed.
    """
    stages = [stages] if isinstance(stages, nn.Module) else list(stages)
    wanted: dict[torch.Tensor, list[str]] = {}
    for stage in stages:
        for tensor, names in stored_tensors(stage, model).items():
            known = wanted.setdefault(tensor, [])
            known += [name for name in names if name not in known]
    files = WeightFiles(path)
    rename = rename or str
    known = [rename(name) for part in (stages if model is None else [model]) for name, _ in named_tensors(part)]
    tied = {} if model is None else {names[0]: names for names in stored_tensors(model).values()}
    groups = [[rename(n) for n in dict.fromkeys((*names, *tied.get(names[0], ())))] for names in wanted.values()]
    sources = dict(zip(wanted, _find(groups, files, prefix, known), strict=True))
    _check(wanted, sources, dtype, files)
    assigned, filled = {}, {}
    for tensor in sorted(wanted, key=lambda tensor: files.file_of(sources[tensor][0])):
        raw = files.tensor(sources[tensor][0])
        if not tensor.is_meta:
            filled[tensor] = shard_like(raw, tensor)
            continue
        kind = _type(tensor, dtype)
        if is_dtensor(tensor):
            value = shard_like(raw.to(kind), tensor, torch.device(device))
        elif (value := raw.to(device, kind)) is raw and not mapped:
            value = raw.clone()
        assigned[tensor] = like(value, tensor)
    replace_tensors(stages, assigned)
    try:
        initialized = initialize_stages(stages, model=model, device=device)
    except BaseException:
        replace_tensors(stages, {new: old for old, new in assigned.items()})
        raise
    for tensor, value in filled.items():
        tensor.copy_(value)
    total = sum(local_tensor(assigned.get(tensor, tensor)).nbytes for tensor in wanted)
    return LoadReport(
        {names[0]: sources[tensor][0] for tensor, names in wanted.items()}, files.opened, total, initialized
    )


def _type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype in _FLOATS else tensor.dtype


# -- names ---------------------------------------------------------------------------------------------------------


def _find(groups: list[list[str]], files: WeightFiles, prefix: str | None, known: list[str]) -> list[list[str]]:
    """Return the names in ``files`` of each tensor, by all its names.

    There are several if tied weights are stored twice.
    """
    if prefix is not None:
        moves = [_given(known, files, prefix.rstrip("."))]
    elif missing := [names for names in groups if not any(name in files for name in names)]:
        exact = [name for names in groups for name in names if name in files]
        moves = [move for move in _common(missing, files) if not any(move.covers(name) for name in exact)]
    else:
        moves = []
    if len(moves) > 1:
        renamed = " or ".join(sorted(str(move) for move in moves))
        raise ValueError(
            f"{files.path} has {missing[0][0]} below more than one name ({renamed}): say which is meant by `prefix`"
        )
    found = []
    for names in groups:
        there = [] if prefix is not None else [name for name in names if name in files]
        found.append(there or [moved for name in names for move in moves if (moved := move(name)) in files])
    lacking = [names[0] for names, there in zip(groups, found, strict=True) if not there]
    if lacking:
        below = f' below the prefix "{prefix}"' if prefix is not None else ""
        raise ValueError(f"{files.path} lacks {_listed(lacking)}{below}; it has {_listed(list(files), 3)}")
    return found


@dataclass(frozen=True)
class _PrefixChange:
    """Map names of a stage to names in the files, by a prefix."""

    add: str = ""
    drop: str = ""

    def __call__(self, name: str) -> str:
        if self.drop and not name.startswith(f"{self.drop}."):
            return name
        bare = name[len(self.drop) + 1 :] if self.drop else name
        return f"{self.add}.{bare}" if self.add else bare

    def covers(self, name: str) -> bool:
        """Return True for names that it is for, so that files with them as they are are not meant."""
        return bool(self.add) or name.startswith(f"{self.drop}.")

    def __str__(self) -> str:
        return f'with "{self.add}." before it' if self.add else f'without "{self.drop}."'


def _given(known: list[str], files: WeightFiles, prefix: str) -> _PrefixChange:
    """Interpret the given prefix: files alone have it, the model alone, or (not needed) both."""
    in_files = any(name.startswith(f"{prefix}.") for name in files)
    in_model = any(name.startswith(f"{prefix}.") for name in known)
    if not in_files and not in_model:
        raise ValueError(
            f'no name begins with "{prefix}.": {files.path} has {_listed(list(files), 3)}, the model {_listed(known, 3)}'
        )
    return (
        _PrefixChange()
        if in_files and in_model
        else _PrefixChange(add=prefix if in_files else "", drop=prefix if in_model else "")
    )


def _common(missing: Sequence[Sequence[str]], files: WeightFiles) -> list[_PrefixChange]:
    """Return the prefix changes with which each of ``missing`` is found.

    Those that find the same are one.
    """
    ends: dict[str, list[str]] = {}
    for stored_name in files:
        ends.setdefault(stored_name.rpartition(".")[2], []).append(stored_name)
    common: set[_PrefixChange] | None = None
    for names in missing:
        moves = set()
        for name in names:
            for there in ends.get(name.rpartition(".")[2], ()):
                if there.endswith(f".{name}"):
                    moves.add(_PrefixChange(add=there[: -len(name) - 1]))
                elif name.endswith(f".{there}"):
                    moves.add(_PrefixChange(drop=name[: -len(there) - 1]))
        common = moves if common is None else common & moves
    return list(common or ())


# -- checks --------------------------------------------------------------------------------------------------------


def _check(
    wanted: dict[torch.Tensor, list[str]], sources: dict[torch.Tensor, list[str]], dtype: torch.dtype | None,
    files: WeightFiles,
) -> None:  # fmt: skip
    """Raise ValueError for tensors that do not fit the stages, before any is read."""
    if dtype is not None and dtype not in _FLOATS:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, _FLOATS))}")
    for tensor, names in wanted.items():
        theirs, *copies = sources[tensor]
        there, where = files.tensor(theirs), files.file_of(theirs)
        kind = _type(tensor, dtype)
        if there.shape != tensor.shape:
            raise ValueError(
                f"{where}: {theirs} is {tuple(there.shape)}, and {names[0]} of this model {tuple(tensor.shape)}"
            )
        if there.dtype != kind and not (there.dtype in _FLOATS and kind in _FLOATS):
            raise ValueError(f"{where}: {theirs} is {there.dtype}, and {names[0]} {kind}: these are not converted")
        if not tensor.is_meta and kind != tensor.dtype:
            raise ValueError(
                f"{names[0]} has memory as {tensor.dtype} already: load it on the meta device, or without dtype"
            )
        for copy in copies:
            if not torch.equal(files.tensor(copy), there):
                raise ValueError(
                    f"{files.file_of(copy)}: {copy} differs from {theirs}, which in this model are one tied weight: untie them, or "
                    "load weights that were trained tied"
                )


def _listed(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
