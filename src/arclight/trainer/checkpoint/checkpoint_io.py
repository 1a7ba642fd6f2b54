"""Write and read a trainer's checkpoints: as folders, as torch files, in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from arclight import checkpoint as checkpoints
from arclight.checkpoint.async_saver import AsyncSaver
from arclight.checkpoint.remote import is_remote, to_path
from arclight.checkpoint.tree import read_stored
from arclight.fabric.batches import map_tensors
from arclight.fabric.strategies import Strategy
from arclight.trainer.fabric.state_io import save_file
from arclight.trainer.settings import LIGHTNING

_RENAMED = {"state_dict": "model", "optimizer_states": "optimizers", "lr_schedulers": "schedulers"}
_POSITION = ("layout", "progress", "logged", "metrics", "precision", "rng", "window", "data")


class CheckpointIO(ABC):
    """Subclass this and pass an instance as ``Trainer(plugins=...)`` to keep checkpoints elsewhere or otherwise.

    Rank 0 alone saves and removes; every rank loads. A save must be complete or leave what was there before.
    """

    suffix: str = ""
    """Ending of the names of what :meth:`save_checkpoint` writes."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``, as :func:`arclight.trainer.checkpoint.state.dump` gives it."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what was saved at ``path``. Raises CheckpointError for what is damaged or would need unpickling."""

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete what was saved at ``path``."""

    def teardown(self) -> None:  # noqa: B027 - only those that write in the background have something to wait for
        """Wait for what is still being written."""


class FolderCheckpointIO(CheckpointIO):
    """Our format: a folder of safetensors and JSON, see ``arclight.checkpoint``. Reads Lightning's files too.

    ``refuse_nan``: a Trainer does not go on from weights that hold NaN; CheckpointError names them.
    """

    def __init__(self, refuse_nan: bool = True) -> None:
        self.refuse_nan = refuse_nan

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options belong to a CheckpointIO of your own: pass one as Trainer(plugins=...)")
        checkpoints.save(path, to_tree(checkpoint))

    def save_shares(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        """The same where tensors are spread over processes, each of which writes its part."""
        checkpoints.save_shares(path, to_tree(checkpoint), processes)

    def load_shares(self, path: str | Path, processes: Strategy) -> dict[str, Any]:
        """Read what :meth:`load_checkpoint` gives, with weights, their averages and optimizer states still in their files."""
        tree = checkpoints.load_shares(path, processes)
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
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return from_tree(checkpoints.load(path, map_location=map_location or "cpu"))

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)


class TorchCheckpointIO(CheckpointIO):
    """One ``.ckpt`` file written by ``torch.save``, which anything that reads Lightning's checkpoints can open."""

    suffix = ".ckpt"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                "`TorchCheckpointIO`: implement your own `CheckpointIO` and pass it as Trainer(plugins=...)"
            )
        save_file(checkpoint, to_path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if to_path(path).is_dir():
            return FolderCheckpointIO().load_checkpoint(path, map_location, weights_only)
        if is_remote(to_path(path)):
            raise checkpoints.CheckpointError(
                f"{path}: files of torch.save are read from local paths only; copy it here first"
            )
        checkpoint: dict[str, Any] = checkpoints.read_pickled(to_path(path), map_location or "cpu")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        checkpoints.remove(path)


_OURS = {*_RENAMED.values(), *_POSITION}


def to_tree(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint folder: what says how far training is lies beside the weights, not below ``loops``.

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
    """The inverse of :func:`to_tree`."""
    back = {new: old for old, new in _RENAMED.items()} | {f"user_{key}": key for key in _OURS}
    checkpoint = {back.get(key, key): value for key, value in tree.items() if key not in _POSITION}
    checkpoint["loops"] = {key: tree[key] for key in _POSITION if key in tree}
    progress = tree.get("progress", {})
    return checkpoint | {name: progress[name] for name in ("epoch", "global_step") if name in progress}


class AsyncCheckpointIO(CheckpointIO):
    """Writes in the background what another CheckpointIO would write at once; pass it as ``Trainer(plugins=...)``.

    A save returns when the state is copied to CPU memory. One is written at a time: the next waits for it, and so do
    loading, removing and the end of the run. An error is raised by whatever comes next, with the path. A process that
    is killed leaves what was there before. ``checkpoint_io`` defaults to what the trainer would use.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io
        self.in_flight: Future[Any] | None = None
        """The newest save; its result comes when the checkpoint is complete."""
        self._saver: AsyncSaver | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"checkpoint_io": self.checkpoint_io, "in_flight": None, "_saver": None, "_thread": None}

    @property
    def wrapped(self) -> CheckpointIO:
        """The checkpoint IO that writes."""
        if self.checkpoint_io is None:
            self.checkpoint_io = FolderCheckpointIO()
        return self.checkpoint_io

    @property
    def refuse_nan(self) -> bool:
        """As what writes has it."""
        return bool(getattr(self.wrapped, "refuse_nan", True))

    @property
    def suffix(self) -> str:  # type: ignore[override]
        return self.wrapped.suffix

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Copy ``checkpoint`` and write it in the background. Raises the error of the save before, if it failed."""
        self.wait()
        if self.checkpoint_io is None and LIGHTNING.version[0] in checkpoint:
            self.checkpoint_io = TorchCheckpointIO()
        if type(self.wrapped) is FolderCheckpointIO and storage_options is None:
            self._saver = self._saver or AsyncSaver()
            self.in_flight = self._saver.save(path, to_tree(checkpoint))
            return
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        options = {} if storage_options is None else {"storage_options": storage_options}
        self.in_flight = self._thread.submit(self.wrapped.save_checkpoint, copied(checkpoint), path, **options)

    @property
    def save_shares(self) -> Callable[[dict[str, Any], str | Path, Strategy], None] | None:
        """Like :meth:`save_checkpoint`, each process its own part; None where what writes cannot do that."""
        return self._save_shares if type(self.wrapped) is FolderCheckpointIO else None

    def _save_shares(self, checkpoint: dict[str, Any], path: str | Path, processes: Strategy) -> None:
        self._saver = self._saver or AsyncSaver()
        self.in_flight = self._saver.save_shares(path, to_tree(checkpoint), processes)

    @property
    def load_shares(self) -> Callable[[str | Path, Strategy], dict[str, Any]] | None:
        """Like :meth:`load_checkpoint`, each process its own part; None where what reads cannot do that."""
        self.wait()
        found: Callable[[str | Path, Strategy], dict[str, Any]] | None = getattr(self.wrapped, "load_shares", None)
        return found

    def hurry(self) -> None:
        """Something has failed: do not wait long for what other processes still have to write."""
        if self._saver is not None:
            self._saver.hurry()

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
        future, self.in_flight = self.in_flight, None
        if self._saver is not None:
            self._saver.wait()
        if future is not None:
            future.result()

    def teardown(self) -> None:
        """Wait, and free thread and buffers."""
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close()
            if self._thread is not None:
                self._thread.shutdown()
            self._saver = self._thread = None
            if self.checkpoint_io is not None:
                self.checkpoint_io.teardown()


def copied(value: Any) -> Any:
    """``value`` with every tensor in it replaced by a copy in CPU memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(item) for item in value)
    return value
