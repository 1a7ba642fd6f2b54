"""Stop training when a value no longer improves.

Users pass it to a Trainer, a recipe's ``[stopping]`` makes it. Arguments, attributes and reasons are Lightning's and stay; keys of its
state are in checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from arclight._intervals import FiniteFloat, NonNegativeInt, check
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.monitored import (
    MissingMetricError,
    check_mode,
    missing_metric,
)

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class EarlyStoppingReason(Enum):
    """Reasons for which training is stopped."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Ask the trainer to stop once ``monitor`` has not improved for ``patience`` checks.

    A check is made after each validation run, or at the end of each training epoch if that is the same
    number of times (or if ``check_on_train_epoch_end`` says so). An improvement is a change of more than
    ``min_delta`` in the direction of ``mode``. Training also stops when the value is not finite
    (``check_finite``), as good as ``stopping_threshold``, or worse than ``divergence_threshold``.
    With several processes, all stop when one of them would: they agree at each check. With ``log_rank_zero_only``
    only the first says why.

    A run that was stopped and is resumed from a checkpoint of that moment stays stopped: train on without this callback.
    With ``strict``, a value that is not logged raises MissingMetricError; otherwise the check is left out.
    """

    runs_last = True
    mode_dict = {"min": torch.lt, "max": torch.gt}
    order_dict = {"min": "<", "max": ">"}

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
        check_mode(mode)
        check("min_delta", min_delta, FiniteFloat)
        check("patience", patience, NonNegativeInt)
        check("stopping_threshold", stopping_threshold, FiniteFloat | None)
        check("divergence_threshold", divergence_threshold, FiniteFloat | None)
        self.monitor, self.mode, self.patience, self.verbose = monitor, mode, patience, verbose
        self.min_delta = abs(min_delta) if mode == "max" else -abs(min_delta)
        self.strict, self.check_finite, self.log_rank_zero_only = strict, check_finite, log_rank_zero_only
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.wait_count = self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._fitting = self._restored = False

    @property
    def monitor_op(self) -> Callable[..., Any]:
        """``torch.lt`` or ``torch.gt``: whether its first argument is better."""
        return self.mode_dict[self.mode]

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self.best_score, self.patience = torch.as_tensor(state_dict["best_score"]), state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._restored = True

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._fitting, self._restored = stage == "fit", False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self._restored and self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            trainer.request_stop()
            rank_zero_warn(
                f"EarlyStopping had stopped the run that saved this checkpoint ({self.stopping_reason_message}), so no "
                "more is trained; leave out EarlyStopping to train on"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._should_skip_check(trainer) and not self._checks_epoch(trainer):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._should_skip_check(trainer) and self._checks_epoch(trainer):
            self._run_early_stopping_check(trainer)

    def _should_skip_check(self, trainer: Trainer) -> bool:
        return not self._fitting or trainer.sanity_checking

    def _checks_epoch(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return trainer.validation_schedule.once_per_epoch

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        metrics, reduce = trainer.callback_metrics, trainer.strategy.reduce_boolean_decision
        here = self.monitor in metrics
        if not reduce(here, all=False):  # on no rank: a value logged on one of them is judged there
            if self.strict:
                raise MissingMetricError("EarlyStopping", self.monitor, metrics)
            if self.verbose:
                rank_zero_warn(missing_metric("EarlyStopping", self.monitor, metrics), category=RuntimeWarning)
            return
        stop, message = self._evaluate_stopping_criteria(metrics[self.monitor].squeeze()) if here else (False, None)
        if reduce(stop, all=False):
            trainer.request_stop()
            self.stopped_epoch = trainer.current_epoch
            self._agree_on_reason(trainer, message if stop else None)
        if message and self.verbose:
            self._log_info(trainer, message, self.log_rank_zero_only)

    def _agree_on_reason(self, trainer: Trainer, message: str | None) -> None:
        """Adopt the reason of the first process that has one, on every rank."""
        reasons = [(self.stopping_reason.value, message)]
        if trainer.world_size > 1:
            reasons = trainer.strategy.all_gather_object(reasons[0])
        value, message = next((reason for reason in reasons if reason[0]), reasons[0])
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason(value), message

    def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
        """Decide whether to stop, and return the message about the value."""
        name, value, best, order = self.monitor, float(current), float(self.best_score), self.order_dict[self.mode]
        if self.check_finite and not math.isfinite(value):
            self.stopping_reason = EarlyStoppingReason.NON_FINITE_METRIC
            return True, f"{name} = {value} is not finite; the best value was {best:.5g}. Stopping."
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            return True, f"Stopping threshold reached: {name} = {value:.5g} {order} {self.stopping_threshold}."
        if self.divergence_threshold is not None and self._better(-value, -self.divergence_threshold):
            self.stopping_reason = EarlyStoppingReason.DIVERGENCE_THRESHOLD
            return True, f"Divergence threshold reached: {name} = {value:.5g} is past {self.divergence_threshold}."
        if self._better(value - self.min_delta, best):
            self.best_score, self.wait_count = current.detach().cpu().clone(), 0
            return False, f"{name} improved from {best:.5g} to {value:.5g}"
        self.wait_count += 1
        if self.wait_count < self.patience:
            return False, None
        self.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED
        return True, f"{name} did not improve in the last {self.wait_count} checks; the best value was {best:.5g}."

    def _better(self, a: float, b: float) -> bool:
        return a < b if self.mode == "min" else a > b

    @staticmethod
    def _log_info(trainer: Trainer, message: str, log_rank_zero_only: bool) -> None:
        if trainer.world_size == 1:
            log.info(message)
        elif trainer.global_rank == 0 or not log_rank_zero_only:
            log.info(f"[rank: {trainer.global_rank}] {message}")
