"""Write predictions to disk on each rank, by batch or by epoch.

Users subclass it; ``loop.evaluation`` keeps outputs and indices for writers of epochs, and warns if a loader has no indices. Names and
signatures are Lightning's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class WriteInterval(StrEnum):
    """Intervals of a prediction writer."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        return self is not WriteInterval.BATCH


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions, after each batch or epoch.

    Override :meth:`write_on_batch_end`, :meth:`write_on_epoch_end` or both, as ``write_interval`` says.

    Every process writes its own share, so name files by ``trainer.global_rank``. With ``return_predictions=False``
    and ``write_interval="batch"`` nothing is kept in memory.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        choices = [str(interval) for interval in WriteInterval]
        if write_interval not in choices:
            raise MisconfigurationError(f"`write_interval` should be one of {choices}, got {write_interval!r}")
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the predictions of one batch.

        ``batch_indices``: the samples' indices in the data set; None if the data has none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_on_batch_end")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Module, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all predictions of an epoch.

        ``predictions``: one per batch, on the host; with several loaders a list of those for each.

        ``batch_indices``: for each loader, the samples' places for each of its batches.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write_on_epoch_end")

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        step = getattr(pl_module, "predict_step", None)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise NotImplementedError(
                f"{type(self).__name__} cannot write for a predict_step that takes `dataloader_iter`, which hides the batches"
            )

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.interval.on_batch:
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self.interval.on_epoch:
            kept = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, kept.predictions, kept.epoch_batch_indices)
