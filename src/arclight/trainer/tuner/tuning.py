"""Define Tuner, like Lightning's: find a batch size or a learning rate before training.

Users call it before a fit. It puts `BatchSizeFinder` or `LearningRateFinder` before a trainer's callbacks and runs an entry point that
ends after the search. Names and arguments are Lightning's and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callbacks.batch_size_finder import BatchSizeFinder
from arclight.trainer.callbacks.learning_rate_finder import LearningRateFinder

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer
    from arclight.trainer.tuner.lr_finder import LRFinder

_METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Find a batch size or learning rate for ``trainer`` and set it, restoring the rest."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def scale_batch_size(
        self, model: Module, train_dataloaders: Any = None, val_dataloaders: Any = None, dataloaders: Any = None,
        datamodule: Any = None, method: str = "fit", mode: str = "power", steps_per_trial: int = 3, init_val: int = 2,
        max_trials: int = 25, batch_arg_name: str = "batch_size", margin: float = 0.05, max_val: int = 8192,
    ) -> int | None:  # fmt: skip
        """Find the largest batch size that fits in memory.

        See :class:`BatchSizeFinder` for the arguments.

        method: the entry point it is for: fit, validate, test or predict. The data must come from the module or ``datamodule``,
        which have the setting ``batch_arg_name``. Raises ValueError for another method and for several processes, and
        MisconfigurationError for loaders that were made already.
        """
        _check(method, train_dataloaders, val_dataloaders, dataloaders)
        if self._trainer.num_devices * self._trainer.num_nodes > 1:
            raise ValueError("Tuning the batch size is currently not supported with distributed strategies.")
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        with self._first(finder):
            if method == "fit":
                self._trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
            else:
                getattr(self._trainer, method)(model, dataloaders, datamodule=datamodule)
        return finder.optimal_batch_size

    def lr_find(
        self, model: Module, train_dataloaders: Any = None, val_dataloaders: Any = None, dataloaders: Any = None,
        datamodule: Any = None, method: str = "fit", min_lr: float = 1e-8, max_lr: float = 1, num_training: int = 100,
        mode: str = "exponential", early_stop_threshold: float | None = 4.0, update_attr: bool = True, attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder | None:  # fmt: skip
        """Run a learning rate range test, a short fit at growing rates; return its result.

        See :class:`LearningRateFinder` for the arguments. None in a development run.

        Raises MisconfigurationError for another method than fit and for several optimizers, AttributeError if
        ``update_attr`` finds no attribute to set. Nothing is unpickled, whatever ``weights_only`` says.
        """
        if method != "fit":
            raise MisconfigurationError("method='fit' is the only valid configuration to run lr finder.")
        _check(method, train_dataloaders, val_dataloaders, dataloaders)
        finder = LearningRateFinder(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name, weights_only
        )
        with self._first(finder):
            self._trainer.fit(model, train_dataloaders, val_dataloaders, datamodule)
        return finder.optimal_lr

    @contextmanager
    def _first(self, finder: BatchSizeFinder | LearningRateFinder) -> Iterator[None]:
        """Put ``finder`` before all other callbacks, to end the run after it; then remove it."""
        trainer, kind = self._trainer, type(finder)
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ValueError(
                f"Trainer is already configured with a `{kind.__name__}` callback: it searches in every run by itself. "
                "Leave it out to use the Tuner"
            )
        finder._early_exit = True
        trainer.use_callbacks([finder, *trainer.callbacks])
        try:
            yield
        finally:
            trainer.use_callbacks([callback for callback in trainer.callbacks if callback is not finder])


def _check(method: str, train: Any, val: Any, loaders: Any) -> None:
    if method not in _METHODS:
        raise ValueError(f"method {method!r} is invalid. Should be one of {_METHODS}.")
    if method == "fit" and loaders is not None:
        raise MisconfigurationError(
            f"In tuner with method={method!r}, `dataloaders` argument should be None, please consider setting "
            "`train_dataloaders` and `val_dataloaders` instead."
        )
    if method != "fit" and (train is not None or val is not None):
        raise MisconfigurationError(
            f"In tuner with `method`={method!r}, `train_dataloaders` and `val_dataloaders` arguments should be None, please "
            "consider setting `dataloaders` instead."
        )
