"""Ending a fit at a loss spike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.trainer import spike
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class SpikeDetection(spike.SpikeDetection, Callback):
    """Ends a fit with :class:`~arclight.trainer.spike.TrainingSpikeException` when the training loss jumps.

    The rules and settings are those of :class:`arclight.trainer.spike.SpikeDetection`; the list of batches to leave out
    goes to ``<default_root_dir>/skip_batches.json`` by default.
    """

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.exclude_batches_path is None:
            self.exclude_batches_path = Path(trainer.default_root_dir) / "skip_batches.json"
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"outputs have to be of type torch.Tensor or Mapping, got {type(outputs).__qualname__}: return the loss "
                "from training_step"
            )
        super().on_train_batch_end(trainer, loss, batch, batch_idx)  # type: ignore[arg-type]
