"""Find a learning rate before a fit, which then begins with it.

Users pass it as a callback; `Tuner.lr_find` runs it too. The search itself is ``tuner.lr_finder``. Name and arguments are Lightning's;
the rates and losses of the search are in checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight._intervals import NonNegativeFloat, PositiveFloat, PositiveInt, check
from arclight.trainer.callback import Callback
from arclight.trainer.loop.progress import StopRun
from arclight.trainer.tuner.lr_finder import LRFinder, lr_find, use_suggestion

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class LearningRateFinder(Callback):
    """Run a learning rate range test, then begin the fit with the suggested rate.

    The suggestion is the rate at which the loss fell most steeply.

    * ``min_lr``, ``max_lr``, ``num_training_steps``, ``mode``: the rates tried, from the first to the last, evenly spaced by
      their logarithm (``exponential``) or by themselves (``linear``).
    * ``early_stop_threshold``: end the search when the smoothed loss is this many times its best; None to go on to the end.
    * ``update_attr``: set the module's ``lr`` or ``learning_rate`` (or ``attr_name``) and its optimizer's rate, its schedules' too.

    ``optimal_lr`` is an :class:`arclight.trainer.tuner.LRFinder`. A resumed fit keeps that of its run, without a search. To search at
    other moments override ``on_fit_start`` and call :meth:`lr_find`. The search leaves no trace but the rate; the module's hooks run in
    it, those of callbacks do not.
    Raises ValueError for another mode, MisconfigurationError for several optimizers, AttributeError if there is no
    attribute to set. ``weights_only`` is taken for the sake of code that has it: nothing is read from a file.
    """

    SUPPORTED_MODES = ("linear", "exponential")

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> None:
        if mode.lower() not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}, got {mode!r}")
        check("min_lr", min_lr, PositiveFloat if mode.lower() == "exponential" else NonNegativeFloat)
        check("max_lr", max_lr, PositiveFloat)
        check("num_training_steps", num_training_steps, PositiveInt)
        check("early_stop_threshold", early_stop_threshold, PositiveFloat | None)
        if max_lr <= min_lr:
            raise ValueError(f"max_lr: need a rate above min_lr = {min_lr}, got {max_lr}")
        self._mode, self._min_lr, self._max_lr = mode.lower(), min_lr, max_lr
        self._num_training_steps, self._early_stop_threshold = num_training_steps, early_stop_threshold
        self._update_attr, self._attr_name = update_attr, attr_name
        self._early_exit = False
        self.optimal_lr: LRFinder | None = None
        self._resumed = False

    @property
    def state_key(self) -> str:
        name = self._attr_name
        return self._generate_state_key(attr_name=name) if name else type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_lr is None else dict(self.optimal_lr.results)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimal_lr, self._resumed = None, True
        if state_dict:
            self.optimal_lr = self._unused()
            self.optimal_lr.results = dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._resumed = False

    def _unused(self) -> LRFinder:
        return LRFinder(self._mode, self._min_lr, self._max_lr, self._num_training_steps)

    def lr_find(self, trainer: Trainer, pl_module: Module) -> None:
        """Run the search now."""
        self.optimal_lr = lr_find(
            trainer, pl_module, self._unused(), self._early_stop_threshold, self._update_attr, self._attr_name
        )
        if self._early_exit:
            raise StopRun

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        resumed, self._resumed = self._resumed, False
        if not resumed or self.optimal_lr is None or self._early_exit:
            self.lr_find(trainer, pl_module)
        elif self._update_attr:
            use_suggestion(
                self.optimal_lr, pl_module, self._attr_name, trainer.optimizers[0], trainer.lr_scheduler_configs
            )
