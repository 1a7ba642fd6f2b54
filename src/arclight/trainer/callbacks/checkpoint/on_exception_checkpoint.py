"""Save a checkpoint when training fails.

Users pass it as a callback; name and arguments are Lightning's. With one process only: see the class for what is not saved.
``checkpoint.resume`` finds its file as "last".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.checkpoint.remote import to_path
from arclight.trainer.callback import Checkpoint
from arclight.trainer.callbacks.checkpoint.file_ops import full_path, remove_checkpoint

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save ``dirpath/filename.ckpt`` when fit is interrupted or fails, to look at or go on from.

    Nothing is saved when the loss is NaN or infinite, as the weights are then useless, nor with several processes, as those that
    did not fail could not take part. The file of an earlier failure is removed once a fit ends well.
    ``dirpath`` defaults to ``checkpoints/`` in the run folder. Raises ValueError for an empty ``filename``.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | Path | None = None, filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("OnExceptionCheckpoint(filename=''): The filename cannot be empty, give the file a name")
        self.dirpath = full_path(dirpath) if dirpath else None
        self.filename = filename
        self._fitting = False

    @property
    def ckpt_path(self) -> str:
        return os.path.join(self.dirpath or "", self.filename + self.FILE_EXTENSION)

    def last_checkpoints(self) -> set[str]:
        """Return the checkpoint of the run that failed, if there is one."""
        return {self.ckpt_path} if self.dirpath is not None and to_path(self.ckpt_path).exists() else set()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting = not trainer.fast_dev_run

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._fitting and trainer.world_size == 1 and not isinstance(exception, FloatingPointError):
            self.dirpath = self.dirpath or trainer.checkpoint_folder
            trainer.save_checkpoint(self.ckpt_path)
        self._fitting = False

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage == "fit" and self._fitting and self.dirpath is not None and trainer.is_global_zero:
            remove_checkpoint(self.ckpt_path, trainer.checkpoint_io)
        self._fitting = False
