"""Define the base of progress bars: totals, descriptions, metrics.

`rich_progress` and `tqdm_progress` build on it, and users' own bars; `Trainer` adds the rich one if none is given. Names are Lightning's
and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class ProgressBar(Callback):
    """Base class of progress bars; define :meth:`enable` and :meth:`disable`.

    A subclass calls ``super().__init__()``.

    Prefer :meth:`~arclight.Callback.on_progress`, which comes at most ten times a second, to hooks of every batch.
    """

    plain_text: bool = False
    """Whether it writes plain text; the default model summary then does, too."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the newest run. Raises TypeError before the first."""
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet: no run has begun")
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None}

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    @property
    def is_enabled(self) -> bool:
        """Return True if anything is shown."""
        return True

    @property
    def is_disabled(self) -> bool:
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from here on."""
        raise NotImplementedError(f"{type(self).__name__} must define disable()")

    def enable(self) -> None:
        """Show progress again."""
        raise NotImplementedError(f"{type(self).__name__} must define enable()")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the display."""
        print(*args, **kwargs)  # noqa: T201

    # -- display ---------------------------------------------------------------------------------------------------

    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    def get_metrics(self, trainer: Trainer, pl_module: Module) -> dict[str, Any]:
        """Return the names and values to show; override to add some or leave some out."""
        standard, logged = get_standard_metrics(trainer), trainer.progress_bar_metrics
        if taken := sorted(standard.keys() & logged.keys()):
            rank_zero_warn(
                f"The progress bar already tracks a metric with the name(s) '{', '.join(taken)}' and "
                f"`self.log('{taken[0]}', ..., prog_bar=True)` will overwrite this value; choose another name or override "
                "`get_metrics()` of the progress bar"
            )
        return {**standard, **logged}

    # -- totals ----------------------------------------------------------------------------------------------------

    @property
    def total_train_batches(self) -> int | float:
        """Number of batches of this epoch; infinity if unknown."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            return min(trainer.num_training_batches, trainer.progress.batch + left)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Number of batches of all validation loaders.

        It is 0 in an epoch without validation, and before the loaders are made.
        """
        every = self.trainer.check_val_every_n_epoch
        due = every is None or (self.trainer.current_epoch + 1) % every == 0
        return sum(self.trainer.num_val_batches) if due else 0

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches of the loader that the current validation or sanity check reads."""
        return self._of_current_loader()

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        return self._of_current_loader()

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        return self._of_current_loader()

    def _of_current_loader(self) -> int | float:
        assert self._current_eval_dataloader_idx is not None, "no evaluation is running"
        return self.trainer.num_eval_batches[self._current_eval_dataloader_idx]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return True for the first batch of loader ``dataloader_idx``; make it the current one."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        self._current_eval_dataloader_idx = None


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return ``v_num``, the version of loggers that number their own runs.

    Empty if there are run folders, whose names have the number.
    """
    if trainer.behavior.run_folders:
        return {}
    versions = dict.fromkeys(str(logger.version) for logger in trainer.loggers if logger.version not in ("", None))
    if not versions:
        return {}
    if len(versions) == 1 and isinstance(version := trainer.loggers[0].version, int):
        return {"v_num": version}
    return {"v_num": "_".join(versions)[-4:]}
