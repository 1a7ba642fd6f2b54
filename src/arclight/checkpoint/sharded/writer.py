"""Save a sharded state: each rank writes its shards, rank 0 the manifest that names them.

The Trainer's checkpoint IO calls `save_shards` for sharding strategies and `ReplicaStrategy`; `async_saver` calls `ShardedSaver.begin`, and
``write`` in the background. The result is a checkpoint like any other (a format on disk), which loads on any number of processes:
`arclight.checkpoint.load` joins the shards, `load_shards` reads only this rank's. All processes must see the same folder. No tensor is
gathered: a process holds its own shards, and a copy of one of them while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.checkpoint import files, tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.manifest import NAME, STATE, FileRecord, describe, is_checkpoint
from arclight.checkpoint.remote import is_explained, to_absolute_path, to_path
from arclight.checkpoint.sharded.plan import EncodedShards, ShardPlan, make_plan, merge_entries
from arclight.checkpoint.tensorfile import write_tensors

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

GatherToRankZero = Callable[[Any], list[Any]]
"""Takes one value of each process, and returns the list of all, at least on rank 0."""


def save_shards(path: str | Path, state: Mapping[str, Any], processes: Strategy) -> Path:
    """Save `state` as the checkpoint folder `path` by all processes; each must call this.

    See `arclight.checkpoint.save`. Of DTensors (on any mesh) each shard is written by one of the processes that hold it. Entries that only
    some processes have, such as the layers of one pipeline stage, are merged; of an entry that several have, tensors must be equal in shape
    and dtype, and other values are those of the lowest rank. Raises CheckpointError on every process if any of them could not write.
    """
    job = ShardedSaver(processes).begin(path, state)
    problem = job.write(processes.all_gather_object)
    problem = processes.broadcast(problem)
    if problem is not None:
        raise CheckpointError(problem)
    return to_path(path)


class ShardedSaver:
    """Saver of one state, repeatedly; layouts are exchanged again only if they change."""

    def __init__(self, processes: Strategy) -> None:
        self.processes = processes
        self._plan: ShardPlan | None = None
        self._layouts: list[str] = []

    @torch.no_grad()  # taking a shard of a DTensor costs a tenth without autograd
    def begin(self, path: str | Path, state: Mapping[str, Any], problem: str | None = None) -> ShardedSave:
        """Agree on which process writes which shard; a collective. Copies no tensor.

        problem: an error of this process so far. Raises CheckpointError on every process if any of them has one.
        """
        path, processes = to_absolute_path(path), self.processes
        staging: Path | None = None
        shards_here: EncodedShards | None = None
        if problem is None:
            shards_here, problem = capture_error(lambda: EncodedShards(state))
        if problem is None and processes.is_global_zero:
            staging, problem = capture_error(lambda: _staging(path))
        known = (shards_here.layout(), shards_here.structure()) if shards_here is not None else ("", "")
        replicas = processes.replica_mesh
        leads = replicas is not None and replicas.get_local_rank(0) == 0
        report = (*known, problem, None if staging is None else str(staging), leads)
        reports: list[Any] = processes.all_gather_object(report)
        if any(problem is not None for _, _, problem, _, _ in reports) or shards_here is None:
            if staging is not None:
                files.discard(staging)
            raise_first(path, [problem for _, _, problem, _, _ in reports])
        assert shards_here is not None
        layouts = [layout for layout, *_ in reports]
        if self._plan is None or layouts != self._layouts:
            try:
                first = {rank for rank, (*_, leads) in enumerate(reports) if leads}
                self._plan, self._layouts = make_plan(processes.all_gather_object(shards_here.places), first), layouts
            except CheckpointError:  # the same on every process
                if staging is not None:
                    files.discard(staging)
                raise
        entries, meshes = self._merge(shards_here, [structure for _, structure, *_ in reports])
        own: dict[str, dict[str, torch.Tensor]] = {}
        for where, shards in self._plan.own(processes.global_rank).items():
            part, regions = shards_here.held[where]
            boxes = {(region.offset, region.shape): region for region in regions}
            for shard in shards:
                own.setdefault(shard.file, {})[shard.name] = boxes[shard.box].of_part(part.detach())
        encoded = None
        if processes.is_global_zero:
            encoded = tree.Encoded(
                self._plan.filled(entries), {}, **shards_here.counts, processes=processes.world_size, meshes=meshes
            )
        return ShardedSave(path, to_path(reports[0][3]), own, encoded)

    def _merge(self, shards_here: EncodedShards, structures: list[str]) -> tuple[dict[str, Any], list[dict[str, int]]]:
        """Merge the entries of all processes.

        Only ranks whose structure no lower rank has send theirs; rank 0's result is the one that is written.
        """
        rank = self.processes.global_rank
        meshes, entries = list(shards_here.meshes), shards_here.entries
        if len(set(structures)) == 1:
            return entries, meshes
        new = structures.index(structures[rank]) == rank
        for other in self.processes.all_gather_object(
            (shards_here.entries, shards_here.meshes) if new and rank else None
        ):
            if other is not None:
                entries = merge_entries(entries, other[0])
                meshes += [mesh for mesh in other[1] if mesh not in meshes]
        return entries, meshes


@dataclass
class ShardedSave:
    """One process's part of a planned save; writing it needs no collective."""

    path: Path
    staging: Path
    own: dict[str, dict[str, torch.Tensor]] = field(repr=False)
    """File -> name -> shard that this process writes."""
    encoded: tree.Encoded | None = field(repr=False)
    """On rank 0: all entries, with the place of each tensor."""

    def write(self, exchange: GatherToRankZero) -> str | None:
        """Write this process's files; rank 0 then waits for all and completes the checkpoint.

        Return why it could not be written, or None: rank 0 knows the errors of all ranks, others only their own.
        """
        records, problem = capture_error(self._write_own)
        if self.encoded is None:
            exchange((records, problem))
            return None if problem is None else f"checkpoint {self.path} could not be written: {problem}"
        try:
            outcomes = exchange((records, problem))
            raise_first(self.path, [problem for _, problem in outcomes])
            self._complete(
                {name: FileRecord(**record) for files_of, _ in outcomes for name, record in files_of.items()}
            )
        except CheckpointError as error:
            return str(error)
        except (OSError, TimeoutError) as error:
            return _sentence(self.path, "", error.strerror or str(error))
        finally:
            files.discard(self.staging)
        return None

    def _write_own(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(_write(self.staging / name, group)) for name, group in self.own.items()}

    def _complete(self, records: dict[str, FileRecord]) -> None:
        assert self.encoded is not None
        records = dict(sorted(records.items()))
        with files.create(self.staging / STATE) as file:
            file.write(json.dumps(self.encoded.entries, allow_nan=False).encode())
        records[STATE] = FileRecord(sha256=file.sha256, bytes=file.bytes)
        with files.create(self.staging / NAME) as file:
            file.write(describe(self.encoded, records, files.data_folder(self.staging)).to_json().encode())
        files.publish(self.staging, self.path)


def _staging(path: Path) -> Path:
    if files.is_there(path) and not is_checkpoint(path) and not files.is_empty(path):
        raise CheckpointError(f"{path} exists and is not a checkpoint: choose another name, it is left as it is")
    files.sweep(path.parent)
    return files.make_staging(path)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    with files.create(path) as file:
        write_tensors(file, tensors)
    return FileRecord(sha256=file.sha256, bytes=file.bytes)


def capture_error(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call `function`; return its result and None, or None and its error as text.

    Raises nothing, since other ranks wait for this one.
    """
    try:
        return function(), None
    except (OSError, CheckpointError) as error:
        return None, str(getattr(error, "strerror", None) if is_explained(error) else error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def raise_first(path: Path, problems: list[str | None]) -> None:
    """Raise CheckpointError for the first rank that has a problem."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(_sentence(path, f" by rank {rank}", problem))


def _sentence(path: Path, who: str, problem: str) -> str:
    return (
        f"checkpoint {path} could not be written{who}: {problem}; what was there before is intact. All processes need to see the "
        "same folder"
    )
