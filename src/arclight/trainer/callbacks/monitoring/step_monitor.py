"""Log what a callback measures in the course of every n-th optimizer step.

Base of `ActivationMonitor`, `CurvatureMonitor` and ``text.callbacks.expert_monitor``: a subclass measures if `is_due`, and gives its
values to `publish`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class StepMonitor(Callback):
    """Base class of callbacks that measure every n-th optimizer step and change nothing.

    Their values are logged at that step alone. Raises MisconfigurationError for ``every_n_steps`` below 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise MisconfigurationError(
                f"{type(self).__name__} needs every_n_steps >= 1, not {every_n_steps}: to turn it off, leave it out"
            )
        self.every_n_steps = every_n_steps

    def is_due(self, step: int) -> bool:
        """Return True if optimizer step ``step``, the first being 1, is measured."""
        return step > 0 and step % self.every_n_steps == 0

    def publish(self, trainer: Trainer, pl_module: Module, values: Mapping[str, float]) -> None:
        """Log those of ``values`` that are finite, for callbacks to monitor too."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name, value in finite.items():
            pl_module.log(name, value, logger=False)  # a logged value would stay in the rows of later steps
        if finite:
            for logger in trainer.loggers:
                logger.log_metrics(finite, trainer.global_step)
