"""Load a checkpoint on any number of ranks, each of which reads only its shards.

The Trainer's checkpoint IO calls `load_shards` for strategies with sharded weights, ``federated.rounds.store`` calls `open_state`. They
open every checkpoint, also one of a single process: each rank reads ``state.json`` and the headers, and tensors when they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.checkpoint import files, tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.filters import select_entries
from arclight.checkpoint.manifest import Manifest
from arclight.checkpoint.remote import is_remote, to_path
from arclight.checkpoint.sharded.writer import capture_error
from arclight.checkpoint.store import fitting, read_entries, read_file, read_whole, verify
from arclight.checkpoint.stored_tensor import Piece, StoredTensor
from arclight.checkpoint.tensorfile import read_header
from arclight.fabric.batches import map_tensors

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


def load_shards(
    path: str | Path,
    processes: Strategy,
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    stored: Iterable[str] | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Load the state at `path` with lazy tensors; every process must call this.

    Of such a tensor (`arclight.checkpoint.stored_tensor.StoredTensor`) a rank reads its own shard; modules and optimizers
    that a strategy has sharded do so in `load_state_dict`. The checkpoint may be from any number of processes.
    only, exclude: as `arclight.checkpoint.load` has them. stored: those whose tensors stay in the files, by default all; the others' are read.
    check: compare the SHA-256 of every file: each is read once, by one of the processes.
    Raises CheckpointError on every process if any of them finds the checkpoint missing, damaged or unreadable.
    """
    path = to_path(path)
    if processes.is_global_zero and not is_remote(path) and not path.exists() and path.parent.is_dir():
        files.sweep(path.parent)
    processes.barrier("checkpoint found")
    problems = verify(path, processes) if check else []
    loaded, problem = capture_error(lambda: _opened(path, only, exclude, stored))
    outcomes = processes.all_gather_object((problem, None if loaded is None else loaded[0]))
    for reason in (*problems, *(reason for reason, _ in outcomes)):
        if reason is not None:
            raise CheckpointError(reason)
    if len({written for _, written in outcomes}) > 1:
        raise CheckpointError(f"{path} was replaced while processes opened it: load it when nobody writes it")
    state: dict[str, Any] = loaded[1]
    return state


def open_state(
    path: Path,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    stored: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Open a checkpoint as `load_shards`, in one process and without hashing tensor files.

    Raises CheckpointError.
    """
    return _opened(path, only, exclude, stored)[1]


def _opened(
    path: Path, only: Iterable[str] | None, exclude: Iterable[str] | None, stored: Iterable[str] | None
) -> tuple[str, dict[str, Any]]:
    """Open a checkpoint: the time it was written, and its state."""

    def read(manifest: Manifest) -> dict[str, Any]:
        entries = read_entries(path, manifest)
        with fitting(path):
            entries = select_entries(path, entries, only, exclude)
            state = tree.decode(entries, _Files(path, manifest))
        kept = set(entries) if stored is None else set(stored)
        return {key: value if key in kept else map_tensors(value, tree.read_stored) for key, value in state.items()}

    manifest, state = read_whole(path, read, verified=False)
    return manifest.created, state


class _Files(Mapping[str, Mapping[str, torch.Tensor]]):
    """The tensors of each file, whose header is read when first asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._read: dict[str, dict[str, torch.Tensor]] = {}

    def __getitem__(self, file: str) -> dict[str, torch.Tensor]:
        if file not in self._read:
            slots = read_file(self._path, file, self._manifest, False, read_header)
            source = files.PlacedFile(self._manifest.at(self._path, file))
            self._read[file] = {
                name: StoredTensor(
                    slot.shape, slot.dtype, [Piece(source, slot.begin, (0,) * len(slot.shape), tuple(slot.shape))]
                )
                for name, slot in slots.items()
            }
        return self._read[file]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.files)

    def __len__(self) -> int:
        return len(self._manifest.files)
