"""Stop training when its time is up.

Users pass a `Timer`, or ``Trainer(max_time=...)`` adds one; with one, ``loop.session`` sets no default limit of epochs. Arguments and
saved state are Lightning's.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback
from arclight.trainer.run.durations import FORMS, Duration, Unit

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Time training, validation and test, and stop training after ``duration``.

    ``duration`` is text such as ``"2h30min"`` or ``"00:12:00:00"`` (days, hours, minutes, seconds), a timedelta or a
    dict of its arguments; None only measures. The limit is checked when training starts and after every batch, or at
    the end of epochs with ``interval="epoch"``, by the first process, whom the others follow.
    Time of earlier sessions counts when a run is resumed.
    Raises MisconfigurationError for a duration that is no time.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, float] | Duration | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise MisconfigurationError(
                f"Unsupported parameter value `Timer(interval={interval!r})`: choose 'step' or 'epoch'"
            )
        limit = None if duration is None else Duration.parse(duration)
        if limit is not None and limit.unit is not Unit.SECONDS:
            raise MisconfigurationError(f"`Timer(duration={duration!r})` is not a duration; {FORMS}")
        self._duration = None if limit is None else float(limit.value)
        self._interval, self._verbose = interval, verbose
        self.unused_hooks = frozenset({"on_train_batch_end"} if interval == "epoch" or limit is None else ())
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._offset = 0.0

    def start_time(self, stage: str = "train") -> float | None:
        """Return the monotonic seconds at which ``stage`` (train, validate, test) began, or None."""
        return self._started.get(known_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the monotonic seconds at which ``stage`` ended, or None."""
        return self._ended.get(known_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in ``stage``, in this session and those it resumed."""
        stage = known_stage(stage)
        offset = self._offset if stage == "train" else 0.0
        if stage not in self._started:
            return offset
        end = self._ended[stage] if stage in self._ended else time.monotonic()
        return offset + end - self._started[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds until the limit; None without one."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._offset = state_dict.get("time_elapsed", {}).get("train", 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("train")
        if trainer.strategy.broadcast(self._time_is_over()):  # what was resumed may have used it up
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["train"] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._ended["test"] = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and self._time_is_over():  # the trainer tells the other processes
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.is_global_zero and self._time_is_over():
            self._stop(trainer)

    def _begin(self, stage: str) -> None:
        self._started[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _time_is_over(self) -> bool:
        return self._duration is not None and self.time_elapsed() >= self._duration

    def _stop(self, trainer: Trainer) -> None:
        trainer.request_stop()
        if self._verbose and trainer.is_global_zero:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            log.info("Time limit reached. %s of training are over. Signaling Trainer to stop.", elapsed)


def known_stage(stage: str) -> str:
    """Return the name of a stage, with ``validation`` read as validate.

    Raises ValueError for an unknown one.
    """
    name = "validate" if stage == "validation" else str(stage)
    if name not in _STAGES:
        raise ValueError(f"Timer: there is no stage {stage!r}; choose one of {', '.join(_STAGES)}")
    return name
