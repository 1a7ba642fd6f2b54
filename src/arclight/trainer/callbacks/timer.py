"""Stop training when its time is up."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_STAGES = {"train": "train", "validate": "validation", "sanity_check": "validation", "test": "test"}


class Timer(Callback):
    """Measure how long training, validation and test take, and stop training after ``duration`` of the first.

    ``duration`` is a timedelta, a dict of its arguments, or text ``"DD:HH:MM:SS"``; None only measures. The limit is
    looked at after every batch, or at the end of epochs with ``interval="epoch"``. Time of earlier sessions counts
    when a run is resumed.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"Timer(interval={interval!r}): choose 'step' or 'epoch'")
        self._limit = None if (limit := as_timedelta(duration)) is None else limit.total_seconds()
        self.interval, self.verbose = interval, verbose
        self.unused_hooks = frozenset({"on_train_batch_end"} if interval == "epoch" or self._limit is None else ())
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._offset = 0.0

    def start_time(self, stage: str = "train") -> float | None:
        """Monotonic seconds at which ``stage`` (train, validation or test) began; None before."""
        return self._started.get(stage)

    def end_time(self, stage: str = "train") -> float | None:
        return self._ended.get(stage)

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in ``stage``, in this session and those it resumed."""
        offset = self._offset if stage == "train" else 0.0
        if stage not in self._started:
            return offset
        return offset + self._ended.get(stage, time.monotonic()) - self._started[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until the limit; None without one."""
        return None if self._limit is None else self._limit - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in ("train", "validation", "test")}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict["time_elapsed"].get("train", 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("train")

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["train"] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["validation"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["test"] = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        # With several processes a stop must be agreed on, which costs an exchange: then only at the logging interval.
        if trainer.world_size == 1 or trainer.global_step % trainer.log_every_n_steps == 0:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._check(trainer)

    def _begin(self, stage: str) -> None:
        self._started[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _check(self, trainer: Trainer) -> None:
        if self._limit is None or not trainer.strategy.broadcast(self.time_elapsed() >= self._limit):
            return
        trainer.should_stop = True
        if self.verbose and trainer.is_global_zero:
            log.info("Timer: %s of training are over; stopping", timedelta(seconds=self._limit))


def as_timedelta(duration: str | timedelta | dict[str, int] | None) -> timedelta | None:
    """A duration from text ``"DD:HH:MM:SS"`` or timedelta's keyword arguments. Raises ValueError for other text."""
    if isinstance(duration, dict):
        return timedelta(**duration)
    if not isinstance(duration, str):
        return duration
    parts = duration.strip().split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"the duration {duration!r} is not of the form DD:HH:MM:SS, such as 00:12:00:00 for twelve hours",
        )
    days, hours, minutes, seconds = map(int, parts)
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
