"""What callbacks and modules may ask a trainer about its data, and what the loops take from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from arclight.data.combined import Count
from arclight.trainer.data import limits, stage_data
from arclight.trainer.data.batches import BatchIterator
from arclight.trainer.data.checks import nothing_to_train
from arclight.trainer.data.stage_data import StageData
from arclight.trainer.loop.evaluation import Predictions
from arclight.trainer.loop.hooks import takes_iterator
from arclight.trainer.profilers.profiling import profile_items

if TYPE_CHECKING:
    from arclight.data import ResumableCombination, ResumableLoader
    from arclight.trainer.trainer import Trainer

_FETCHING = "[_TrainingEpochLoop].train_dataloader_next"
"""What profilers call the wait for a batch."""


class DataView:
    """The data of a trainer's stages."""

    data: dict[str, StageData]
    predict_loop: Predictions
    num_training_batches: Count
    batch_iterator: BatchIterator | None
    loader_state: dict[str, Any]

    # -- the user's loaders, as they were given --------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training data of the newest fit; None before they were asked for."""
        return self._structure("train")

    @property
    def val_dataloaders(self) -> Any:
        return self._structure("validate")

    @property
    def test_dataloaders(self) -> Any:
        return self._structure("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._structure("predict")

    def _structure(self, stage: str) -> Any:
        return self.data[stage].structure if stage in self.data else None

    # -- how many batches ------------------------------------------------------------------------------------------

    @property
    def num_val_batches(self) -> list[Count]:
        """Batches of each validation loader, within the limits; empty before they were asked for."""
        return self._counts("validate")

    @property
    def num_sanity_val_batches(self) -> list[Count]:
        """Batches of each validation loader that the check before training runs."""
        steps = cast("Trainer", self).num_sanity_val_steps
        if "validate" in self.data and self.data["validate"].function != "fit":
            return []
        return [count if steps == -1 else min(steps, count) for count in self._counts("validate")]

    @property
    def num_test_batches(self) -> list[Count]:
        return self._counts("test")

    @property
    def num_predict_batches(self) -> list[Count]:
        return self._counts("predict")

    @property
    def num_eval_batches(self) -> list[Count]:
        """Batches of each loader in the evaluation under way."""
        trainer = cast("Trainer", self)
        stage = {"sanity_check": "validate", "train": "validate"}.get(trainer.stage, trainer.stage)
        return limits.evaluated(trainer, self.data[stage].limits) if stage in self.data else []

    def _counts(self, stage: str) -> list[Count]:
        return self.data[stage].counts if stage in self.data else []

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates: there are data and a step for it, and no limit forbids it."""
        return stage_data.validates(cast("Trainer", self))

    @property
    def val_check_batch(self) -> Count:
        """Training batches from one validation to the next: an epoch's, unless ``val_check_interval`` says otherwise."""
        return limits.batches_between_validations(cast("Trainer", self))

    @property
    def estimated_stepping_batches(self) -> Count:
        """Optimizer steps of the whole fit, for schedules; infinity where it is not known."""
        trainer = cast("Trainer", self)
        if "train" in self.data:
            stage_data.load(trainer, "train")
        return limits.estimated_steps(trainer)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments for a ``DistributedSampler`` of one's own: of the ranks that read different data."""
        return cast("Trainer", self).strategy.distributed_sampler_kwargs

    # -- what the loops take ---------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> ResumableLoader | ResumableCombination | None:
        """The training data, by epoch and position."""
        loaders = self.data["train"].loaders if "train" in self.data else ()
        return loaders[0] if loaders else None

    def train_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Batches ``start`` onwards of an epoch; for a step that takes the iterator, that iterator in every turn."""
        loader, total = self.train_loader, self.num_training_batches
        if loader is None:
            raise RuntimeError("no training data: fit has not begun")
        trainer = cast("Trainer", self)
        step = trainer.lightning_module.training_step
        if takes_iterator(step):
            start = self.loader_state.pop("fetched", start)
            fetched = _everywhere(trainer, profile_items(trainer, _FETCHING, loader.batches(epoch, start)), total)
            triples = ((batch, index, 0) for index, batch in enumerate(fetched, start))
            self.batch_iterator = BatchIterator(triples, total, start)
            return self.batch_iterator.turns()
        batches = _everywhere(trainer, profile_items(trainer, _FETCHING, loader.batches(epoch, start)), total)
        return batches if total == math.inf else islice(batches, int(total) - start)

    def next_validation(self) -> Count:
        """Number of batches of this epoch after which validation is due next; infinity where none is."""
        return limits.next_validation(cast("Trainer", self))

    def validates_when_epoch_is_over(self) -> bool:
        """Whether the epoch's validation is still due after its last batch."""
        return limits.validates_after_last_batch(cast("Trainer", self))


def _everywhere(trainer: Trainer, batches: Iterator[Any], total: Count) -> Iterator[Any]:
    """Look whether all processes have a first batch, where the number of batches is not known: a collective of each epoch.

    Raises MisconfigurationError on all of them where only some have.
    """
    if total != math.inf or trainer.world_size == 1:
        return batches
    first = list(islice(batches, 1))
    having = trainer.strategy.all_gather_object(bool(first))
    if any(having) and not all(having):
        raise nothing_to_train([rank for rank, has in enumerate(having) if not has])
    return chain(first, batches)
