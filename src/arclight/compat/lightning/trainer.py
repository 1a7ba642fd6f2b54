"""The Trainer that keeps Lightning's habits."""

from __future__ import annotations

from arclight.compat.lightning.loops import FitLoop, StageLoop
from arclight.trainer import Trainer as _Trainer
from arclight.trainer.conventions import LIGHTNING


class Trainer(_Trainer):
    """Our Trainer for code that was written for Lightning's: see :class:`arclight.trainer.conventions.Conventions`."""

    conventions = LIGHTNING

    @property
    def fit_loop(self) -> FitLoop:
        return FitLoop(self)

    @property
    def validate_loop(self) -> StageLoop:
        return StageLoop(self, "validate")

    @property
    def test_loop(self) -> StageLoop:
        return StageLoop(self, "test")
