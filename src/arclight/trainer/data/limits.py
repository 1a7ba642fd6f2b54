"""Decide how many batches a stage runs, when a fit validates, and how long it lasts.

`connector` limits loaders by `count_batches`, `fit` asks `timed_validation`. `Trainer` builds the `ValidationSchedule`, which `FitLoop`,
`EarlyStopping` and `ModelCheckpoint` ask (``trainer.validation_schedule``, ``trainer.next_validation``). Meanings of ``limit_*`` and
``val_check_interval`` are Lightning's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.run.durations import Duration

if TYPE_CHECKING:
    from arclight.data import ResumableLoader
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.loop.progress import Progress

Count = int | float
"""A number of batches; infinity for a loader that does not know its length."""

BATCHES_BETWEEN_CLOCKS = 100
"""Most batches between two looks at the clock, with several ranks: batches may become slower than expected."""


def limit_name(stage: str) -> str:
    """Return the stage's name in ``limit_*_batches``."""
    return {"validate": "val", "sanity_check": "val"}.get(stage, stage)


def count_batches(loader: ResumableLoader, limit: Count, name: str) -> Count:
    """Count the batches of ``loader`` within ``limit``; infinity for an unknown length.

    An int is a count, a float a share of the batches; ``name`` as in ``limit_<name>_batches``. Raises MisconfigurationError
    for a share of a loader without length, and for one that leaves nothing.
    """
    length: Count = len(loader) if loader.sized else math.inf
    if limit < 0 or (isinstance(limit, float) and limit > 1):
        raise MisconfigurationError(
            f"a limit on batches is a count (int) or a share in [0, 1] (float); limit_{name}_batches is {limit}"
        )
    if isinstance(limit, int) or length == 0:
        return min(length, limit)
    if length == math.inf:
        if limit != 1.0:
            raise MisconfigurationError(
                f"When using an `IterableDataset`, `Trainer(limit_{name}_batches)` must be `1.0` or an int, got {limit}: there "
                f"is no share of an unknown length. An int specifies `num_{name}_batches` to use."
            )
        return length
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise MisconfigurationError(
            f"You requested to check {limit} of the `{name}_dataloader` but {limit} * {length} < 1. Please increase the "
            f"`limit_{name}_batches` argument. Try at least `limit_{name}_batches={1.0 / length}`"
        )
    return batches


@dataclass(frozen=True)
class ValidationSchedule:
    """Schedule of a fit's validations: ``val_check_interval``, ``check_val_every_n_epoch``.

    ``total``: batches of an epoch.

    ``enabled``: there are data and a step to validate with, and no limit forbids it.
    """

    interval: Any
    every_n_epochs: int | None
    total: Count
    enabled: bool = True

    def includes(self, epoch: int) -> bool:
        """Return True if ``epoch`` is one that validates, if there is anything to validate with."""
        return self.every_n_epochs is None or (epoch + 1) % self.every_n_epochs == 0

    @property
    def at_epoch_end(self) -> bool:
        """Return True if validation comes when an epoch is over, and not after so many batches."""
        return self.interval is None or (isinstance(self.interval, float) and self.interval == 1.0)

    @property
    def once_per_epoch(self) -> bool:
        """Return True if every epoch ends with exactly one validation, or there is none at all."""
        return not self.enabled or (self.every_n_epochs == 1 and self.at_epoch_end)

    @property
    def batches(self) -> Count:
        """Number of training batches between validations.

        Raises MisconfigurationError for a share of an unknown number.
        """
        if self.interval is None or self.at_epoch_end:
            return self.total
        if isinstance(self.interval, float):
            if self.total == math.inf:
                raise MisconfigurationError(
                    "When using an IterableDataset for `train_dataloader`, `Trainer(val_check_interval)` must be time based, `1.0` "
                    f"or an int, got {self.interval}. An int k specifies checking validation every k training batches."
                )
            return max(1, int(self.total * self.interval))
        return int(self.interval)

    def is_due(self, progress: Progress) -> bool:
        """Return True if the epoch under way validates."""
        return self.enabled and self.includes(progress.epoch)

    def next_batch(self, progress: Progress) -> Count:
        """Return the batch of this epoch to validate after next; infinity for none.

        Validation at the epoch's end does not count.
        """
        if not self.is_due(progress) or self.at_epoch_end or isinstance(self.interval, (str, dict, timedelta)):
            return math.inf  # never, when the epoch is over, or when it is time
        done, interval, by_epoch = progress.batch, self.batches, self.every_n_epochs is not None
        if by_epoch and interval > self.total:
            raise MisconfigurationError(
                f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches ({self.total}). "
                "Set `check_val_every_n_epoch=None` to count batches across epochs, or `limit_val_batches=0` to validate never."
            )
        offset = 0 if by_epoch else progress.batches - done
        if done and progress.validated_at != done and (offset + done) % interval == 0:
            return done  # resumed from a checkpoint between this batch and its validation
        return int((offset + done) // interval * interval + interval - offset)

    def is_due_at_epoch_end(self, progress: Progress) -> bool:
        """Return True if validation at the epoch's end is still due.

        With an interval only its multiples validate.
        """
        return self.at_epoch_end and self.is_due(progress) and progress.validated_at != progress.batch

    def is_due_before_stop(self, progress: Progress) -> bool:
        """Return True if this batch can still be validated before a stop.

        It has not been, and the end of its epoch will not do it.
        """
        at_end = self.at_epoch_end and progress.batch == self.total
        return self.is_due(progress) and not at_end and progress.validated_at != progress.batch


def timed_validation(
    interval: Any,
    progress: Progress,
    strategy: Strategy,
    validated: Callable[[], float],
    validates: Callable[[int], bool],
) -> Callable[[], bool] | None:
    """Return a check for time-based validation, or None for another ``interval``.

    The check is called after each batch and returns True when validation is due.

    The time counts from the end of the last validation, at ``validated()`` on the monotonic clock, so that one that takes longer
    than the interval does not follow every batch; ``validates(epoch)`` tells if an epoch validates at all. Rank 0's clock counts
    for all ranks. It also says after how many batches to ask again: half of those that it expects to take the time that is left, so
    that most batches cost no exchange.
    """
    if not isinstance(interval, (str, dict, timedelta)):
        return None
    seconds = Duration.parse(interval).seconds
    if seconds is None:
        raise MisconfigurationError(f"`val_check_interval={interval!r}` is not a time")
    asked_at, asked_time, ask_at = progress.batches, time.monotonic(), 0

    def is_due() -> bool:
        nonlocal asked_at, asked_time, ask_at
        if progress.batches < ask_at or not validates(progress.epoch):
            return False
        now = time.monotonic()
        left = seconds - (now - validated())
        wait = 1
        if strategy.world_size > 1:
            a_batch = (now - asked_time) / max(1, progress.batches - asked_at)
            wait = int(min(BATCHES_BETWEEN_CLOCKS, max(1.0, left / 2 / max(a_batch, 1e-9))))
            left, wait = strategy.broadcast((left, wait))
        asked_at, asked_time, ask_at = progress.batches, now, progress.batches + wait
        return bool(left <= 0)

    return is_due


def estimated_steps(
    batches: Count, max_epochs: int | None, max_steps: int, window: int, *, windows_span_epochs: bool
) -> Count:
    """Estimate the optimizer steps of a fit; infinity if neither limit nor length is known.

    ``batches`` in an epoch, ``window`` of them to a step.
    """
    if max_epochs is None or max_epochs == -1 or batches == math.inf:
        return max_steps if max_steps != -1 else math.inf
    steps: Count = (
        math.ceil(batches * max_epochs / window) if windows_span_epochs else math.ceil(batches / window) * max_epochs
    )
    return steps if max_steps == -1 else min(steps, max_steps)


def log_interval(every: int, steps: Count) -> int:
    """Return the steps between two logged rows: ``every``, or a tenth of a shorter fit."""
    return every if steps >= every else max(1, int(steps) // 10)
