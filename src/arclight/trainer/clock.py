"""What a fit goes by when it counts its optimizer steps: schedules, rhythms of saving and logging, the x-axis of logs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from arclight.trainer.optimizer_config import LRSchedulerConfig
    from arclight.trainer.trainer import Trainer


class Clock:
    """Moves the step count of a fit that joins others, which went on without it or were set back.

    Make it where optimizers and schedules are new (``on_fit_start``), call :meth:`set` when training begins (``on_train_start``).
    What is counted in samples, batches or epochs stays: those are this fit's own.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._fresh = [_state(config) for config in _by_step(trainer)]

    def set(self, step: int) -> None:
        """From here on ``step`` optimizer steps are done. Nothing happens where they are.

        A schedule by steps gets the rates that it would have after ``step`` steps without any in between being left out.
        Schedules that watch a value stay as they are.
        """
        before = self._trainer.global_step
        if step == before:
            return
        self._trainer.progress.global_step = step
        for config, fresh in zip(_by_step(self._trainer), self._fresh, strict=True):
            _move(config, fresh, before, step)


def _by_step(trainer: Trainer) -> list[LRSchedulerConfig]:
    return [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]


def _state(config: LRSchedulerConfig) -> dict[str, Any]:
    """A schedule's state, and what it may have set in its optimizer's groups."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in config.scheduler.optimizer.param_groups]
    return copy.deepcopy({"scheduler": config.scheduler.state_dict(), "groups": groups})


def _move(config: LRSchedulerConfig, fresh: dict[str, Any], before: int, step: int) -> None:
    scheduler, every = config.scheduler, config.frequency
    ticks = step // every
    with _any_order():
        if isinstance(scheduler, LambdaLR):  # a function of the step alone
            scheduler.last_epoch = ticks - 1
            scheduler.step()
            return
        done = before // every
        if ticks < done:
            scheduler.load_state_dict(copy.deepcopy(fresh["scheduler"]))
            for group, values in zip(scheduler.optimizer.param_groups, copy.deepcopy(fresh["groups"]), strict=True):
                group.update(values)
            done = 0
        for _ in range(ticks - done):
            scheduler.step()


@contextmanager
def _any_order() -> Iterator[None]:
    """Torch warns of schedules that are stepped before their optimizer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield
