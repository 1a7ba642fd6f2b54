"""When a checkpoint is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.run.durations import Duration, Unit
from arclight.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class Rhythm:
    """Every so many steps, epochs, seconds, or units of a :class:`Duration`; at most one of them."""

    steps: int = 0
    epochs: int = 0
    interval: timedelta | None = None
    count: Duration | None = None

    @classmethod
    def of(
        cls, steps: int | None, epochs: int | None, interval: timedelta | None, every: str | Duration | None
    ) -> Rhythm:
        """A rhythm from ModelCheckpoint's arguments: every epoch where none of them is given.

        Raises MisconfigurationError for negative numbers and for two rhythms at once.
        """
        for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
            if (value or 0) < 0:
                raise MisconfigurationError(f"Invalid value for {name}={value}: it is 0 (never) or more. Must be >= 0")
        if bool(steps) + bool(epochs) + (interval is not None) + (every is not None) > 1:
            raise MisconfigurationError(
                f"Combination of parameters every_n_train_steps={steps}, every_n_epochs={epochs}, "
                f"train_time_interval={interval} and every={every} should be mutually exclusive: choose one of them, or "
                "use two ModelCheckpoints for two rhythms"
            )
        if every is not None:
            duration = Duration.parse(every)
            if duration.value <= 0:
                raise MisconfigurationError(f"ModelCheckpoint(every={str(every)!r}): must be more than nothing")
            if duration.unit is Unit.EPOCHS:
                return cls(epochs=int(duration.value))
            if duration.unit is Unit.SECONDS:
                return cls(interval=timedelta(seconds=duration.value))
            return cls(count=duration)
        return cls(steps or 0, 1 if steps is None and epochs is None and interval is None else epochs or 0, interval)

    @property
    def within_epochs(self) -> bool:
        """Whether a save may be due between the ends of epochs."""
        return bool(self.steps) or self.interval is not None or self.count is not None

    def resolved(self, trainer: Trainer) -> Rhythm:
        """With a fraction of the training as a number of steps. Raises MisconfigurationError where its length is unknown."""
        if self.count is None or self.count.unit is not Unit.FRACTION:
            return self
        total = trainer.estimated_stepping_batches
        if total == math.inf:
            raise MisconfigurationError(
                f"ModelCheckpoint(every='{self.count}'): how long training will be is not known; give the Trainer "
                "max_steps, or give a number of batches"
            )
        return replace(self, steps=max(1, math.ceil(self.count.value * total)), count=None)


class Beat:
    """Where a fit stands in a rhythm between the ends of epochs."""

    def __init__(self, rhythm: Rhythm, trainer: Trainer, clock: Callable[[], float]) -> None:
        self.rhythm, self._clock = rhythm.resolved(trainer), clock
        self._time, self._counted = clock(), self._count(trainer)

    def due(self, trainer: Trainer) -> bool:
        """Whether a save is due after this batch."""
        rhythm = self.rhythm
        if rhythm.interval is not None:
            return self._time_is_over(trainer, rhythm.interval.total_seconds())
        if rhythm.count is None:
            return rhythm.steps > 0 and trainer.global_step % rhythm.steps == 0
        before, self._counted = self._counted, self._count(trainer)
        return self._counted > before

    def _time_is_over(self, trainer: Trainer, seconds: float) -> bool:
        every = trainer.log_every_n_steps or TrainerSettings.log_every_n_steps  # 0: no rows, but saves
        if trainer.world_size > 1 and trainer.global_step % every:
            return False  # agreeing on the time costs an exchange: not in every step
        now = self._clock()
        over: bool = trainer.strategy.broadcast(now - self._time >= seconds)
        if over:
            self._time = now
        return over

    def _count(self, trainer: Trainer) -> int:
        """How many times the rhythm's count fits into what has been trained so far."""
        count = self.rhythm.count
        if count is None:
            return 0
        name = {Unit.BATCHES: "batches", Unit.SAMPLES: "samples", Unit.TOKENS: "tokens"}[count.unit]
        return int(getattr(trainer.progress, name) // count.value)
