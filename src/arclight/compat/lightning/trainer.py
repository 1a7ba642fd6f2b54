"""The Trainer that keeps Lightning's habits."""

from __future__ import annotations

import ast
import inspect
import os
from functools import wraps
from typing import TYPE_CHECKING, Any

from arclight.compat.lightning.loops import FitLoop, PredictLoop, StageLoop
from arclight.trainer import Trainer as _Trainer
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.settings import LIGHTNING


class Trainer(_Trainer):
    """Our Trainer for code that was written for Lightning's: see :class:`arclight.trainer.settings.Conventions`."""

    behavior = LIGHTNING

    if not TYPE_CHECKING:  # for type checkers, too, it takes what ours takes

        @wraps(_Trainer.__init__)  # the signature that tools show
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**from_environment() | arguments)

    @property
    def current_epoch(self) -> int:
        """The epoch under way; once a fit has left its last one, however far that was, the number of epochs begun."""
        return self.progress.epoch + (self.state.fn == TrainerFn.FITTING and self.run_state.left_within_epoch)

    @property
    def fit_loop(self) -> FitLoop:
        return FitLoop(self)

    @property
    def validate_loop(self) -> StageLoop:
        return StageLoop(self, "validate")

    @property
    def test_loop(self) -> StageLoop:
        return StageLoop(self, "test")

    @property
    def predict_loop(self) -> Any:
        return PredictLoop(self, self.run_state.predictions)


def from_environment() -> dict[str, Any]:
    """Arguments from variables such as ``PL_TRAINER_MAX_STEPS=7``; those in the program's text go before them."""
    found: dict[str, Any] = {}
    for name in inspect.signature(_Trainer.__init__).parameters:
        if (text := os.environ.get(f"PL_TRAINER_{name.upper()}")) is not None:
            try:
                found[name] = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                found[name] = text
    return found
