"""Report a monitored value at each validation, so that a caller can prune the run.

``arclight tune`` (``cli.tune.trial``) runs each trial with it. A function comes in that takes value and number, and returns True to
prune.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.monitored import MissingMetricError, check_mode

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class MetricReport(Callback):
    """Call ``report(value, number)`` after each validation; end the run if it returns True.

    ``value`` is that of ``monitor``, ``number`` counts from 1.

    A run without validation reports at the end of each epoch. A value that is not logged raises MissingMetricError.
    """

    runs_last = True

    def __init__(self, monitor: str, mode: str, report: Callable[[float, int], bool]) -> None:
        check_mode(mode)
        self.monitor, self.mode, self.report = monitor, mode, report
        self.values: list[float] = []
        self.stopped = False
        self._logged: set[str] = set()

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.enable_validation:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        self._logged |= trainer.callback_metrics.keys()
        if self.monitor not in trainer.callback_metrics:
            raise MissingMetricError("MetricReport", self.monitor, self._logged)
        self.values.append(float(trainer.callback_metrics[self.monitor]))
        if self.report(self.values[-1], len(self.values)):
            self.stopped = True
            trainer.request_stop()

    def best(self) -> float:
        """Return the best value of the run. Raises ValueError if none was finite."""
        if not self.values:
            raise MissingMetricError("MetricReport", self.monitor, self._logged)
        known = [value for value in self.values if math.isfinite(value)]
        if not known:
            raise ValueError(f"{self.monitor} was {self.values[-1]} at every validation")
        return max(known) if self.mode == "max" else min(known)
