"""Write and read checkpoints: folders, torch files, either in the background.

A Trainer writes folders (:class:`FolderCheckpointIO`), under ``compat`` files (:class:`TorchCheckpointIO`); a Fabric what the name asks
for (:class:`StateIO`). All of them read both. Strategies (``fabric.strategies``) save and load by a plugin for Trainer and Fabric; users
may write their own: names and arguments of the methods are Lightning's. The names that `to_tree` gives are on disk and stay.
"""

from __future__ import annotations

import copy
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from arclight import checkpoint as checkpoints
from arclight.checkpoint.async_saver import AsyncSaver
from arclight.checkpoint.files import is_there, sweep, temporary_file
from arclight.checkpoint.remote import is_remote, to_path
from arclight.checkpoint.tree import read_stored
from arclight.fabric.batches import map_tensors
from arclight.fabric.strategies import Strategy

_RENAMED = {"state_dict": "model", "optimizer_states": "optimizers", "lr_schedulers": "schedulers"}
_POSITION = ("layout", "progress", "logged", "metrics", "precision", "rng", "window", "data")
_FILES = (".ckpt", ".pt", ".pth", ".bin")


class CheckpointIO(ABC):
    """Base class of checkpoint plugins, to keep checkpoints elsewhere or in another format.

    Subclass it and pass an instance as ``Trainer(plugins=...)``.

    Rank 0 alone saves and removes; every rank loads. A save must be complete or leave what was there before.
    """

    suffix: str = ""
    """Suffix of the checkpoints that :meth:`save_checkpoint` writes."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``, as ``checkpoint.state.CheckpointConnector.dump`` gives it."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``.

        Raises CheckpointError for what is damaged or would need unpickling.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete what was saved at ``path``."""

    def teardown(self) -> None:  # noqa: B027 - only those that write in the background have something to wait for
        """Wait for what is still being written."""


class FolderCheckpointIO(CheckpointIO):
    """Checkpoint IO of our format: a folder of safetensors and JSON.

    See ``arclight.checkpoint``. Reads Lightning's files too.

    ``refuse_nan``: a Trainer does not go on from weights that hold NaN; CheckpointError names them.
    """

    def __init__(self, refuse_nan: bool = True) -> None:
        self.refuse_nan = refuse_nan

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        _refuse_options(storage_options, "FolderCheckpointIO")
        checkpoints.save(path, to_tree(checkpoint))

    def save_shards(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        """Save tensors that are sharded over processes, each of which writes its part."""
        checkpoints.save_shards(path, to_tree(checkpoint), processes)

    def load_shards(self, path: str | Path, processes: Strategy) -> dict[str, Any]:
        """Read a checkpoint with weights, averages and optimizer states as lazy shards.

        The rest is what :meth:`load_checkpoint` returns.
        """
        tree = checkpoints.load_shards(path, processes)
        names = set(tree.get("model", ()))
        large = {"model", "optimizers"} | {
            key for key, entry in tree.items() if isinstance(entry, dict) and entry and names >= set(entry)
        }
        return from_tree(
            {key: value if key in large else map_tensors(value, read_stored) for key, value in tree.items()}
        )

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if to_path(path).is_file():
            found: dict[str, Any] = _read_file(to_path(path), map_location)
            return found
        return from_tree(checkpoints.load(path, map_location=map_location or "cpu"))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete the file or folder, if it is there.

        Raises CheckpointError for a folder that is no checkpoint.
        """
        place = to_path(path)
        if place.is_file() and not place.is_symlink():
            place.unlink()
        elif is_there(place):
            checkpoints.remove(place)


class TorchCheckpointIO(CheckpointIO):
    """Checkpoint IO of single ``.ckpt`` files of ``torch.save``, as Lightning reads them."""

    suffix = ".ckpt"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        _refuse_options(storage_options, "TorchCheckpointIO")
        save_file(checkpoint, to_path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return FolderCheckpointIO().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        FolderCheckpointIO().remove_checkpoint(path)


class StateIO(FolderCheckpointIO):
    """Checkpoint IO of a Fabric: a folder, or a file of ``torch.save``.

    It is a file if the name ends in .ckpt, .pt, .pth or .bin.

    Its entries have the names that they are given.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``; what was at ``path`` is there until all of the new one is.

        Raises CheckpointError for what could not be written, or could not be read back without unpickling.
        """
        _refuse_options(storage_options, "StateIO")
        if PurePath(str(path)).suffix in _FILES:
            save_file(checkpoint, to_path(path))
        else:
            checkpoints.save(path, checkpoint)

    def save_shards(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        checkpoints.save_shards(path, checkpoint, processes)

    def load_shards(self, path: str | Path, processes: Strategy) -> dict[str, Any]:
        """Load as :meth:`load_checkpoint` does, with tensors that are still in their files."""
        return checkpoints.load_shards(path, processes)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the state at ``path``.

        Raises CheckpointError for what is damaged or would need unpickling.
        """
        if to_path(path).is_file():
            found: dict[str, Any] = _read_file(to_path(path), map_location)
            return found
        return checkpoints.load(path, map_location=map_location or "cpu")


def _refuse_options(options: Any, writer: str) -> None:
    if options is not None:
        raise TypeError(
            f"`storage_options` are not supported by `{writer}`: implement a `CheckpointIO` of your own that takes them and pass it as "
            "Trainer(plugins=...) or Fabric(plugins=...)"
        )


def _read_file(path: Path, map_location: Any) -> Any:
    """Read one file of ``torch.save`` or safetensors."""
    if is_remote(path):
        raise checkpoints.CheckpointError(
            f"{path}: files of torch.save are read from local paths only; copy it here first"
        )
    if path.suffix == ".safetensors":
        return checkpoints.load_weights(path)
    return checkpoints.read_pickled(path, map_location or "cpu")


def save_file(state: dict[str, Any], path: Path) -> None:
    """Write one file of ``torch.save`` that can be read without unpickling.

    What killed saves left in its folder is removed. Raises CheckpointError for a state or a place of which there can be no such file, and
    leaves what was there.
    """
    if is_remote(path):
        raise checkpoints.CheckpointError(
            f"{path}: one file of torch.save is written to local paths only; checkpoint folders, whose names have no ending such as "
            f"{', '.join(_FILES)} for a Fabric, can lie at an address"
        )
    if path.is_dir():
        raise checkpoints.CheckpointError(f"{path} is a folder, which one file cannot replace: choose another name")
    sweep(path.parent)
    temporary = temporary_file(path)
    try:
        with temporary.open("wb") as file:
            torch.save(_without_numpy_numbers(state), file)
            file.flush()
            os.fsync(file.fileno())
        checkpoints.read_pickled(temporary)  # maps the file, so that this reads no tensor
        os.replace(temporary, path)
    except OSError as error:
        raise checkpoints.CheckpointError(
            f"{path} could not be written: {error.strerror}; what was there before is intact"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _without_numpy_numbers(value: Any) -> Any:
    """Replace NumPy scalars by Python's, because the former need unpickling."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        changed = {key: new for key, item in value.items() if (new := _without_numpy_numbers(item)) is not item}
        if not changed:
            return value
        replaced = copy.copy(value)  # with the type and the attributes, which torch keeps a version in
        replaced.update(changed)
        return replaced
    if type(value) in (list, tuple):
        items = [_without_numpy_numbers(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    return value


_OURS = {*_RENAMED.values(), *_POSITION}


def to_tree(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint to the entries of a checkpoint folder.

    The position in training lies beside the weights, not below ``loops``.

    What a user's hook added under one of these names gets another.
    """
    loops = checkpoint.get("loops", {})
    tree = {
        f"user_{key}" if key in _OURS else _RENAMED.get(key, key): value
        for key, value in checkpoint.items()
        if key not in ("loops", "epoch", "global_step")
    }
    return tree | {key: loops[key] for key in _POSITION if key in loops}


def from_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Invert :func:`to_tree`."""
    back = {new: old for old, new in _RENAMED.items()} | {f"user_{key}": key for key in _OURS}
    checkpoint = {back.get(key, key): value for key, value in tree.items() if key not in _POSITION}
    checkpoint["loops"] = {key: tree[key] for key in _POSITION if key in tree}
    progress = tree.get("progress", {})
    return checkpoint | {name: progress[name] for name in ("epoch", "global_step") if name in progress}


class AsyncCheckpointIO(CheckpointIO):
    """Checkpoint IO that writes through another one in the background.

    Pass it as ``Trainer(plugins=...)``.

    A save returns when the state is copied to CPU memory. One is written at a time: the next waits for it, and so do
    loading, removing and the end of the run. An error is raised by whatever comes next, with the path. A process that
    is killed leaves what was there before. ``checkpoint_io`` defaults to what the trainer would use.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io
        self.in_flight: Future[Any] | None = None
        """The newest save; its result comes when the checkpoint is complete."""
        self._saver: AsyncSaver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"checkpoint_io": self.checkpoint_io, "in_flight": None, "_saver": None}

    @property
    def wrapped(self) -> CheckpointIO:
        """The checkpoint IO that writes."""
        return self.wrap(FolderCheckpointIO)

    def wrap(self, usual: Callable[[], CheckpointIO]) -> CheckpointIO:
        """Write by the checkpoint IO that was given, or else by a ``usual`` one from here on."""
        self.checkpoint_io = self.checkpoint_io or usual()
        return self.checkpoint_io

    @property
    def refuse_nan(self) -> bool:
        """Return the setting of the wrapped writer."""
        return bool(getattr(self.wrapped, "refuse_nan", True))

    @property
    def suffix(self) -> str:  # type: ignore[override]
        return self.wrapped.suffix

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Copy ``checkpoint`` and write it in the background.

        Raises the error of the save before, if it failed.
        """
        self._saver = self._saver or AsyncSaver()
        if type(self.wrapped) is FolderCheckpointIO and storage_options is None:
            self.in_flight = self._saver.save(path, to_tree(checkpoint))
            return
        options = {} if storage_options is None else {"storage_options": storage_options}
        self._saver.wait()  # before memory is taken for another copy
        self.in_flight = self._saver.submit(partial(self.wrapped.save_checkpoint, copied(checkpoint), path, **options))

    @property
    def save_shards(self) -> Callable[[dict[str, Any], str | Path, Strategy], None] | None:
        """Like :meth:`save_checkpoint`, each process its own shard; None if not supported."""
        return self._save_shards if type(self.wrapped) is FolderCheckpointIO else None

    def _save_shards(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        self._saver = self._saver or AsyncSaver()
        self.in_flight = self._saver.save_shards(path, to_tree(checkpoint), processes)

    @property
    def load_shards(self) -> Callable[[str | Path, Strategy], dict[str, Any]] | None:
        """Like :meth:`load_checkpoint`, each process its own shard; None if not supported."""
        self.wait()
        found: Callable[[str | Path, Strategy], dict[str, Any]] | None = getattr(self.wrapped, "load_shards", None)
        return found

    def limit_wait(self) -> None:
        """Limit the wait for what other processes still have to write, after a failure."""
        if self._saver is not None:
            self._saver.limit_wait()

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.wait()
        return self.wrapped.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.wait()
        self.wrapped.remove_checkpoint(path)

    def wait(self) -> None:
        """Return when nothing is being written. Raises the error of the last save, once."""
        self.in_flight = None
        if self._saver is not None:
            self._saver.wait()

    def teardown(self) -> None:
        """Wait, and free thread and buffers."""
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close()
            self._saver = None
            if self.checkpoint_io is not None:
                self.checkpoint_io.teardown()


def copied(value: Any) -> Any:
    """Return ``value`` with every tensor in it replaced by a copy in CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(item) for item in value)
    return value
