"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from arclight.checkpoint.saver import AsyncSaver
from arclight.fabric.strategies import Strategy
from arclight.trainer.checkpoint_io import CheckpointIO, FolderCheckpointIO, TorchCheckpointIO, to_tree
from arclight.trainer.conventions import LIGHTNING


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
        """What writes."""
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
