"""How many batches, when to validate, how many steps in all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.warnings import PossibleUserWarning
from arclight.trainer.run.durations import Duration

if TYPE_CHECKING:
    from arclight.data import ResumableLoader
    from arclight.trainer.trainer import Trainer

Count = int | float
"""A number of batches; infinity for a loader that does not know its length."""


def resolve_length(trainer: Trainer) -> None:
    """How long a fit lasts where the user did not say: 1000 epochs, or none where steps or time limit it."""
    from arclight.trainer.callbacks import Timer

    if trainer.max_epochs is None:
        limited = trainer.max_steps != -1 or any(isinstance(callback, Timer) for callback in trainer.callbacks)
        if not limited:
            trainer.warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set `max_epochs=-1`.",
                PossibleUserWarning,
            )
        trainer.max_epochs = -1 if limited else 1000


MOST_UNASKED = 100
"""Batches at most between two looks of several ranks at the clock: they may become slower than was expected."""

_PREFIX = {"validate": "val", "sanity_check": "val"}


def setting(trainer: Trainer, stage: str) -> Count:
    """The ``limit_*_batches`` of a stage."""
    limit: Count | None = getattr(trainer, f"limit_{_PREFIX.get(stage, stage)}_batches")
    return 1.0 if limit is None else limit


def count(trainer: Trainer, stage: str, loader: ResumableLoader) -> Count:
    """Batches of `loader` that a stage runs; infinity for all of a loader without length.

    An int is a count, a float a share of the batches. Raises MisconfigurationError for a share of a loader without
    length, and for one that leaves nothing.
    """
    limit, prefix = setting(trainer, stage), _PREFIX.get(stage, stage)
    length: Count = len(loader) if loader.sized else math.inf
    if limit < 0 or (isinstance(limit, float) and limit > 1):
        raise MisconfigurationError(
            f"a limit on batches is a count (int) or a share in [0, 1] (float); limit_{prefix}_batches is {limit}"
        )
    if isinstance(limit, int) or length == 0:
        return min(length, limit)
    if length == math.inf:
        if limit != 1.0:
            raise MisconfigurationError(
                f"When using an `IterableDataset`, `Trainer(limit_{prefix}_batches)` must be `1.0` or an int, got {limit}: there "
                f"is no share of an unknown length. An int specifies `num_{prefix}_batches` to use."
            )
        return length
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise MisconfigurationError(
            f"You requested to check {limit} of the `{prefix}_dataloader` but {limit} * {length} < 1. Please increase the "
            f"`limit_{prefix}_batches` argument. Try at least `limit_{prefix}_batches={1.0 / length}`"
        )
    return batches


def evaluated(trainer: Trainer, counts: list[Count]) -> list[Count]:
    """Batches that an evaluation runs of each loader: fewer where it only checks that validation works."""
    steps = trainer.num_sanity_val_steps
    if not trainer.sanity_checking or steps == -1:
        return counts
    return [min(steps, number) for number in counts]


def validates_in(trainer: Trainer, epoch: int) -> bool:
    """Whether `epoch` is one that validates, if there is anything to validate with."""
    every = trainer.check_val_every_n_epoch
    return every is None or (epoch + 1) % every == 0


def validation_due(trainer: Trainer) -> bool:
    """Whether this epoch is one that validates."""
    return trainer.enable_validation and validates_in(trainer, trainer.progress.epoch)


def next_validation(trainer: Trainer) -> Count:
    """Batches of this epoch after which the next validation is due; infinity for none (or only at the epoch's end)."""
    if not validation_due(trainer):
        return math.inf
    total, done = trainer.num_training_batches, trainer.progress.batch
    if at_epoch_end(trainer) or isinstance(trainer.val_check_interval, (str, dict, timedelta)):
        return math.inf  # when the epoch is over, or when it is time
    interval = batches_between_validations(trainer)
    if trainer.check_val_every_n_epoch is not None and interval > total:
        raise MisconfigurationError(
            f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches ({total}). Set "
            "`check_val_every_n_epoch=None` to count batches across epochs, or `limit_val_batches=0` to validate never."
        )
    offset = 0 if trainer.check_val_every_n_epoch is not None else trainer.progress.batches - done
    if done and trainer.progress.validated_at != done and (offset + done) % interval == 0:
        return done  # resumed from a checkpoint between this batch and its validation
    return int((offset + done) // interval * interval + interval - offset)


def timed_validation(trainer: Trainer) -> Callable[[], bool] | None:
    """Return a function that tells after a batch if validation is due by the clock; None if ``val_check_interval`` is no time.

    The time counts from the end of the last validation, so that one that takes longer than the interval does not follow
    every batch. Rank 0's clock counts for all ranks. It also says after how many batches to ask again: half of those that it
    expects to take the time that is left, so that most batches cost no exchange.
    """
    if not isinstance(trainer.val_check_interval, (str, dict, timedelta)):
        return None
    seconds = Duration.parse(trainer.val_check_interval).seconds
    if seconds is None:
        raise MisconfigurationError(f"`val_check_interval={trainer.val_check_interval!r}` is not a time")
    if trainer.validated_time is None:
        trainer.validated_time = time.monotonic()
    every, progress, strategy = trainer.check_val_every_n_epoch, trainer.progress, trainer.strategy
    asked_at, asked_time, ask_at = progress.batches, time.monotonic(), 0

    def is_due() -> bool:
        nonlocal asked_at, asked_time, ask_at
        if progress.batches < ask_at:
            return False
        if not trainer.enable_validation or (every is not None and (progress.epoch + 1) % every):
            return False
        now = time.monotonic()
        left = seconds - (now - (trainer.validated_time or 0))
        wait = 1
        if strategy.world_size > 1:
            a_batch = (now - asked_time) / max(1, progress.batches - asked_at)
            wait = int(min(MOST_UNASKED, max(1.0, left / 2 / max(a_batch, 1e-9))))
            left, wait = strategy.broadcast((left, wait))
        asked_at, asked_time, ask_at = progress.batches, now, progress.batches + wait
        return bool(left <= 0)

    return is_due


def at_epoch_end(trainer: Trainer) -> bool:
    """Whether validation comes when an epoch is over, and not after so many batches."""
    interval = trainer.val_check_interval
    return interval is None or (isinstance(interval, float) and interval == 1.0)


def batches_between_validations(trainer: Trainer) -> Count:
    """Training batches from one validation to the next. Raises MisconfigurationError for a share of an unknown number."""
    interval, total = trainer.val_check_interval, trainer.num_training_batches
    if interval is None or at_epoch_end(trainer):
        return total
    if isinstance(interval, float):
        if total == math.inf:
            raise MisconfigurationError(
                "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be time based, `1.0` "
                f"or an int, got {interval}. An int k specifies checking validation every k training batches."
            )
        return max(1, int(total * interval))
    return int(interval)


def validates_after_last_batch(trainer: Trainer) -> bool:
    """Return True if validation at the epoch's end is still due: with an interval only its multiples validate."""
    if trainer.conventions.skip_leaves_out_validation and batch_under_way(trainer):
        return False
    return at_epoch_end(trainer) and validation_due(trainer) and trainer.progress.validated_at != trainer.progress.batch


def batch_under_way(trainer: Trainer) -> bool:
    """Return True from the start of a training batch until it is counted; one that is skipped never is."""
    values = trainer.training_values
    return values.in_batches and values.batch.index == trainer.progress.batch


def validation_before_stop(trainer: Trainer) -> bool:
    """Return True if a fit that stops at this batch validates first, unless it just has or its epoch's end will."""
    if not trainer.conventions.validate_before_stop or not validation_due(trainer):
        return False
    progress = trainer.progress
    at_end = at_epoch_end(trainer) and progress.batch == trainer.num_training_batches
    return not at_end and progress.validated_at != progress.batch


def estimated_steps(trainer: Trainer) -> Count:
    """Optimizer steps of the whole fit; infinity where neither limit nor length is known."""
    if trainer.max_epochs == -1 or trainer.num_training_batches == math.inf:
        return trainer.max_steps if trainer.max_steps != -1 else math.inf
    batches, window, epochs = trainer.num_training_batches, trainer.accumulate_grad_batches, trainer.max_epochs
    spans = trainer.conventions.windows_span_epochs
    steps: Count = math.ceil(batches * epochs / window) if spans else math.ceil(batches / window) * epochs
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
