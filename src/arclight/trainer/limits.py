"""How many batches, when to validate, how many steps in all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arclight.data import ResumableLoader
    from arclight.trainer.trainer import Trainer

Count = int | float
"""A number of batches; infinity for a loader that does not know its length."""


def resolve_max_epochs(max_epochs: int | None, max_steps: int) -> int:
    """Epochs to run, -1 for no limit. Without any limit Lightning's default of 1000 epochs holds."""
    if max_epochs is not None:
        if max_epochs < -1:
            raise ValueError(f"max_epochs must be -1 (no limit) or more, got {max_epochs}")
        return max_epochs
    return 1000 if max_steps == -1 else -1


def batch_limit(limit: Count | None, loader: ResumableLoader) -> int | None:
    """A ``limit_*_batches`` setting as a number of batches of ``loader``; None for all of them.

    An int is a count, a float a share of the batches. Raises ValueError for a share outside 0 to 1, and for a share
    of a loader without length.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if isinstance(limit, int) and limit >= 0:
        return limit
    if not 0 <= limit <= 1:
        raise ValueError(f"a limit on batches is a count (int) or a share in [0, 1] (float), got {limit}")
    if not loader.sized:
        raise ValueError(f"a limit of {limit} of the batches needs a loader with a length; give a count instead")
    return int(len(loader) * limit)


def count_batches(limit: int | None, loader: ResumableLoader) -> Count:
    """Batches that will run."""
    known: Count = len(loader) if loader.sized else math.inf
    return known if limit is None else min(known, limit)


def validation_due(trainer: Trainer) -> bool:
    """Whether this epoch is one that validates."""
    every = trainer.check_val_every_n_epoch
    return bool(trainer.val_loaders) and (every is None or (trainer.progress.epoch + 1) % every == 0)


def next_validation(trainer: Trainer) -> Count:
    """Batches of this epoch after which the next validation is due; infinity for none (or only at the epoch's end)."""
    if not validation_due(trainer):
        return math.inf
    interval, total, done = trainer.val_check_interval, trainer.num_training_batches, trainer.progress.batch
    if interval is None or (isinstance(interval, float) and interval == 1.0):
        return math.inf  # when the epoch is over
    if isinstance(interval, float):
        if total == math.inf:
            raise ValueError(
                f"val_check_interval={interval} needs a training loader with a length; give a number of batches"
            )
        interval = max(1, int(total * interval))
    if trainer.check_val_every_n_epoch is not None and interval > total:
        raise ValueError(
            f"val_check_interval={interval} is more than the {total} batches of an epoch; set check_val_every_n_epoch=None to count across epochs"
        )
    offset = 0 if trainer.check_val_every_n_epoch is not None else trainer.progress.batches - done
    if done and trainer.progress.validated_at != done and (offset + done) % interval == 0:
        return done  # resumed from a checkpoint between this batch and its validation
    return (offset + done) // interval * interval + interval - offset


def validates_after_last_batch(trainer: Trainer) -> bool:
    """Whether validation at the epoch's end is still due: with an interval only its multiples validate."""
    interval = trainer.val_check_interval
    at_end = interval is None or (isinstance(interval, float) and interval == 1.0)
    return at_end and validation_due(trainer) and trainer.progress.validated_at != trainer.progress.batch


def estimated_steps(trainer: Trainer) -> Count:
    """Optimizer steps of the whole fit; infinity where neither limit nor length is known."""
    if trainer.max_epochs == -1 or trainer.num_training_batches == math.inf:
        return trainer.max_steps if trainer.max_steps != -1 else math.inf
    steps: Count = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) * trainer.max_epochs
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
