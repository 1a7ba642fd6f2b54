"""Define ``lightning.Trainer``: our Trainer with Lightning's defaults and its loop objects.

User code gets this class as ``Trainer``, by the table in `names`, and `cli` builds it. The loops (``trainer.fit_loop`` and its like) are views
of our trainer's progress and state; training itself is our Trainer's, by the `TrainerBehavior` `LIGHTNING`. Argument names, defaults and
loop attributes are Lightning 2.x's and stay.
"""

from __future__ import annotations

import ast
import inspect
import os
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arclight.compat.lightning.names import __version__
from arclight.fabric.environments import SLURMEnvironment
from arclight.trainer import Trainer as _Trainer
from arclight.trainer.loggers import CSVLogger, TensorBoardLogger
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.settings import TrainerBehavior

if TYPE_CHECKING:
    from arclight.trainer.loggers import Logger
    from arclight.trainer.loop.predictions import Predictions


@dataclass
class Counts:
    """Lightning's four counts of batches or steps; our trainer counts completed ones only."""

    ready: int
    started: int
    processed: int
    completed: int


@dataclass
class CountView:
    """Counts of the current epoch or run, and of all."""

    current: Counts
    total: Counts


def _counts(done: int, under_way: int = 0) -> Counts:
    return Counts(done + under_way, done + under_way, done, done)


class StageLoop:
    """View of an evaluation as ``trainer.validate_loop`` or ``trainer.test_loop``."""

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self.trainer, self.stage = trainer, stage

    def setup_data(self) -> None:
        """Create the stage's loaders, if that has not been done."""
        self.trainer.data.load(self.stage)

    @property
    def batch_progress(self) -> CountView:
        """Return the counts of this stage's newest run, and of all its runs."""
        trainer = self.trainer
        return CountView(_counts(trainer.run_state.eval_batch), _counts(trainer.run_state.evaluated[self.stage]))

    @property
    def max_batches(self) -> list[int | float]:
        return self.trainer.data.counts(self.stage)


class PredictLoop(StageLoop):
    """View of a prediction as ``trainer.predict_loop``, with its settings and results."""

    def __init__(self, trainer: Trainer, kept: Predictions) -> None:
        super().__init__(trainer, "predict")
        self.kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["kept"], name)


class EpochLoop:
    """View of a fit as ``trainer.fit_loop.epoch_loop``."""

    restarting = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.val_loop = trainer, StageLoop(trainer, "validate")

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self.trainer.set_limits(max_steps=steps)

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @min_steps.setter
    def min_steps(self, steps: int | None) -> None:
        self.trainer.set_limits(min_steps=steps)

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    @property
    def batch_idx(self) -> int:
        """Index of the current (or newest) batch in its epoch; -1 before the first."""
        index = self.trainer.run_state.training_values.batch.index
        return index if index >= 0 else self.trainer.progress.batch - 1

    @property
    def total_batch_idx(self) -> int:
        """Index of the current (or newest) batch among all; -1 before the first."""
        return self.trainer.progress.batches - (not self._under_way)

    @property
    def batch_progress(self) -> CountView:
        progress, more = self.trainer.progress, int(self._under_way)
        return CountView(_counts(progress.batch, more), _counts(progress.batches, more))

    @property
    def _under_way(self) -> bool:
        """Return True from the start of a batch until it is counted."""
        return self.trainer.run_state.batch_under_way


class FitLoop:
    """View of a fit as ``trainer.fit_loop``."""

    restarting = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.epoch_loop = trainer, EpochLoop(trainer)

    def setup_data(self) -> None:
        """Create the training loaders, if that has not been done."""
        self.trainer.data.load("train")

    @property
    def max_batches(self) -> int | float:
        return self.trainer.num_training_batches

    @property
    def max_epochs(self) -> int:
        return self.trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int) -> None:
        self.trainer.set_limits(max_epochs=epochs)

    @property
    def min_epochs(self) -> int | None:
        return self.trainer.min_epochs

    @min_epochs.setter
    def min_epochs(self, epochs: int | None) -> None:
        self.trainer.set_limits(min_epochs=epochs)

    @property
    def max_steps(self) -> int:
        return self.trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        return self.trainer.min_steps

    @property
    def global_step(self) -> int:
        return self.trainer.global_step

    @property
    def batch_idx(self) -> int:
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        return self.epoch_loop.total_batch_idx

    @property
    def epoch_progress(self) -> CountView:
        progress = self.trainer.progress
        counts = _counts(progress.epoch + progress.ended, int(bool(progress.batch) and not progress.ended))
        return CountView(counts, counts)

    @property
    def done(self) -> bool:
        return self.trainer.fit_is_over

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.trainer.progress.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.progress.load_state_dict(state["progress"])


def _versioned_logger(folder: str) -> Logger:
    """Return Lightning's default logger, of ``folder/lightning_logs/version_<n>``.

    A TensorBoard logger if that is installed, else a CSV logger; n is a SLURM job's number.
    """
    if find_spec("tensorboard") is None:
        return CSVLogger(folder)
    return TensorBoardLogger(folder, version=SLURMEnvironment.job_id())


LIGHTNING = TrainerBehavior(
    zero_grad_first=True,
    closures=True,
    count_optimizer_steps=True,
    windows_span_epochs=False,
    weigh_windows=False,
    stop_on_nonfinite=False,
    sanity_val_steps=2,
    checkpoint_suffix=".ckpt",
    run_folders=False,
    default_logger=_versioned_logger,
    version=("pytorch-lightning_version", __version__),
    evaluate_best=True,
    exit_on_interrupt=True,
    metrics_by_batch=True,
    callbacks_factory="lightning.pytorch.callbacks_factory",
    validate_before_stop=True,
    skip_leaves_out_validation=True,
    frequency_counts_batches=True,
    drop_unpicklable_hparams=True,
    zero_based_rows=True,
    fetch_labels=(
        "[_TrainingEpochLoop].train_dataloader_next", "[_EvaluationLoop].val_next", "[_EvaluationLoop].test_next",
        "[_PredictionLoop].predict_next",
    ),
    refuse_removed_hooks=True,
)  # fmt: skip
"""Lightning's behaviour where it differs from ours."""


class Trainer(_Trainer):
    """Our Trainer with Lightning's conventions, for code that was written for its own.

    See :class:`arclight.trainer.settings.TrainerBehavior`.
    """

    behavior = LIGHTNING

    if not TYPE_CHECKING:  # type checkers see the signature of ours

        @wraps(_Trainer.__init__)  # the signature that tools show
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**from_environment() | arguments)

    def set_limits(self, **limits: int | None) -> None:
        """Set limits of the fit, as the loop objects do.

        ``max_epochs``, ``min_epochs``, ``max_steps`` or ``min_steps``.
        """
        for name, limit in limits.items():
            setattr(self, name, limit)

    @property
    def current_epoch(self) -> int:
        """Return the current epoch; after a fit the number of epochs that were started."""
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
    """Read arguments from variables such as ``PL_TRAINER_MAX_STEPS=7``.

    Arguments in code take precedence.
    """
    found: dict[str, Any] = {}
    for name in inspect.signature(_Trainer.__init__).parameters:
        if (text := os.environ.get(f"PL_TRAINER_{name.upper()}")) is not None:
            try:
                found[name] = ast.literal_eval(text)
            except (SyntaxError, ValueError):
                found[name] = text
    return found
