"""Stop training when a value no longer improves."""

from __future__ import annotations

import logging
import math
from enum import Enum
from typing import TYPE_CHECKING, Any

from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.monitored import MissingMetricError, check_mode

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class EarlyStoppingReason(Enum):
    """Why training was stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Ask the trainer to stop once ``monitor`` has not improved for ``patience`` checks.

    A check is made after each validation run, or at the end of each training epoch where that is the same
    number of times (or where ``check_on_train_epoch_end`` says so). An improvement is a change of more than
    ``min_delta`` in the direction of ``mode``. Training also stops when the value is not finite
    (``check_finite``), as good as ``stopping_threshold``, or worse than ``divergence_threshold``.
    With ``strict``, a value that is not logged raises MissingMetricError; otherwise the check is left out.
    """

    runs_last = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        check_mode("EarlyStopping", mode)
        self.monitor, self.min_delta, self.patience, self.verbose, self.mode = (
            monitor,
            abs(min_delta),
            patience,
            verbose,
            mode,
        )
        self.strict, self.check_finite, self.log_rank_zero_only = strict, check_finite, log_rank_zero_only
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = math.inf if mode == "min" else -math.inf
        self.wait_count = self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._fitting = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self.best_score, self.patience = float(state_dict["best_score"]), state_dict["patience"]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting = True

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting = False

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._fitting = False

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting and not trainer.sanity_checking and not self._checks_epoch(trainer):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting and self._checks_epoch(trainer):
            self._check(trainer)

    def _checks_epoch(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return validates_once_per_epoch(trainer)

    def _check(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        if trainer.fast_dev_run:
            return
        if self.monitor not in metrics:
            if self.strict:
                raise MissingMetricError("EarlyStopping", self.monitor, metrics)
            return
        reason, message = self._judge(float(metrics[self.monitor]))
        if trainer.strategy.reduce_boolean_decision(reason is not EarlyStoppingReason.NOT_STOPPED, all=False):
            trainer.should_stop, self.stopped_epoch = True, trainer.current_epoch
            self.stopping_reason, self.stopping_reason_message = reason, message
        if message and self.verbose and (trainer.is_global_zero or not self.log_rank_zero_only):
            log.info(message)

    def _judge(self, current: float) -> tuple[EarlyStoppingReason, str | None]:
        name, best = self.monitor, self.best_score
        if self.check_finite and not math.isfinite(current):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"{name} = {current} is not finite; the best value was {best:.5g}. Stopping.",
            )
        if self.stopping_threshold is not None and self._better(current, self.stopping_threshold):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"{name} = {current:.5g} reached the goal of {self.stopping_threshold}. Stopping.",
            )
        if self.divergence_threshold is not None and self._better(-current, -self.divergence_threshold):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{name} = {current:.5g} is past the limit of {self.divergence_threshold}. Stopping.",
            )
        if self._better(current, best, by=self.min_delta):
            self.best_score, self.wait_count = current, 0
            return EarlyStoppingReason.NOT_STOPPED, f"{name} improved from {best:.5g} to {current:.5g}"
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, None
        message = (
            f"{name} did not improve in the last {self.wait_count} checks; the best value was {best:.5g}. Stopping."
        )
        return EarlyStoppingReason.PATIENCE_EXHAUSTED, message

    def _better(self, a: float, b: float, by: float = 0.0) -> bool:
        return a + by < b if self.mode == "min" else a - by > b


def validates_once_per_epoch(trainer: Trainer) -> bool:
    """Whether every training epoch ends with exactly one validation run, or there is none at all."""
    if not trainer.num_val_batches:
        return True
    interval = trainer.val_check_interval
    return trainer.check_val_every_n_epoch == 1 and (
        interval is None or (isinstance(interval, float) and interval == 1.0)
    )
