"""Write logger rows, update callback metrics, and describe NaN or infinite losses.

The loops call a `Reporter` (``trainer.reporter``) at logging intervals, around evaluations and at ends of epochs; `Trainer` asks
`nonfinite_loss`. All ranks call it, as it reduces over them. Values stay on the device until then. Names of values (``x_step``,
``x_epoch``) are Lightning's; numbers of rows are, with ``zero_based``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.logging.metrics import read_scalars, to_float32
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.logging.sync import reduce_epoch, reduce_steps
from arclight.trainer.loop.progress import TrainerFn

if TYPE_CHECKING:
    import torch

    from arclight.fabric.strategies import Strategy
    from arclight.trainer.loop.run_state import RunState


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite."""


def nonfinite_loss(run: RunState, log_every: int) -> str | None:
    """Describe the newest loss if it is NaN or infinite, for a NonFiniteLossError.

    None if it is finite.

    Asked at each logging interval of ``log_every`` steps, at epoch ends and before saving: such a loss corrupts the weights for
    good, so it cannot be missed for long, and no checkpoint is written after it.
    """
    if run.last_loss is None or math.isfinite(loss := float(run.last_loss.detach())):
        return None
    progress, run.last_loss = run.progress, None
    return (
        f"the loss is {loss} at step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch - 1}, at most "
        f"{log_every} steps after it first was): lower the learning rate, set gradient_clip_val, or look for bad input; "
        "the checkpoints before this point are unharmed"
    )


class Reporter:
    """Write the rows of a run's loggers and the values that its callbacks see.

    ``loggers``: asked for when a row is due, as they may make their folder then; ``zero_based``: number rows by the
    step that made them, counted from 0, not by steps completed (by batches, if the optimization is not ``automatic``).
    """

    def __init__(
        self,
        run: RunState,
        strategy: Strategy,
        module: nn.Module,
        loggers: Callable[[], Sequence[Any]],
        *,
        zero_based: bool,
        automatic: bool,
    ) -> None:
        self.run, self.strategy, self.module = run, strategy, module
        self._loggers, self._zero_based, self._automatic = loggers, zero_based, automatic

    def log_step(self) -> None:
        """Send the newest step values to the loggers, in one transfer from the device."""
        values = self.run.logged
        reduce_steps(values.entries(), self.strategy)
        if self._loggers():
            self.log_row(self._step_values(values))

    def _step_values(self, values: ResultCollection, loader: int | None = None) -> dict[str, torch.Tensor]:
        self.run.metrics.update_steps(values)
        return {
            entry.step_name: to_float32(entry.last)
            for entry in values.entries()
            if entry.last is not None and entry.settings.logger and entry.loader == loader
        }

    def log_row(self, values: dict[str, torch.Tensor], step: int | None = None) -> None:
        """Log one row to every logger, at ``step`` or at the run's step and epoch.

        Each logger chooses the ranks on which it writes.

        A value logged under the name ``step`` takes the place of the run's step.
        """
        if not values or not self._loggers():
            return
        row: dict[str, Any] = dict(read_scalars(values))
        if step is None:
            if "step" in row:
                step = int(row.pop("step"))
            else:
                row = {"epoch": self.run.progress.epoch, **row}
                step = self.row_number
        for logger in self._loggers():
            logger.log_metrics(metrics=dict(row), step=step)
            logger.save()

    @property
    def counts_batches(self) -> bool:
        """Return True if rows are numbered by batches.

        So are Lightning's in manual optimization, where a batch may step several optimizers or none.
        """
        return self._zero_based and not self._automatic

    @property
    def steps(self) -> int:
        """Steps completed, as rows count them: updates, or batches."""
        progress = self.run.progress
        return progress.batches if self.counts_batches else progress.global_step

    @property
    def row_number(self) -> int:
        """The x-axis of a row: steps completed, or the number of the step under way counted from 0.

        That is the newest one; in a validation within an accumulation window the one that the window is for.
        """
        run, steps = self.run, self.steps
        if not self._zero_based or run.state.fn != TrainerFn.FITTING or (run.stage == "validate" and run.window.count):
            return steps
        return max(0, steps - 1)

    @property
    def newest_row(self) -> int:
        """Number of the newest row so far; a run that goes on from here writes later ones again.

        A validation within an accumulation window has a row of the step that the window is for.
        """
        return self.steps if self.run.window.count else self.row_number

    # -- the end of an epoch -------------------------------------------------------------------------------------------

    def reduce_epoch(self, values: ResultCollection) -> dict[str, torch.Tensor]:
        """Reduce new epoch values over all ranks and show them; return those for loggers."""
        entries = reduce_epoch(values, self.strategy, self.module)
        if values.in_batches:
            self.run.metrics.update_steps(values)
            values.in_batches = False
        self.run.metrics.update_epoch(entries)
        return {e.epoch_name: e.result for e in entries if e.result is not None and e.settings.logger}

    def end_batches(self, values: ResultCollection) -> dict[str, torch.Tensor]:
        """Reduce the values of an epoch (or of one of its loaders) after its last batch."""
        values.batch.set(None)
        return self.reduce_epoch(values)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> ResultCollection:
        """Start collecting an evaluation's values; publish those of the interrupted training."""
        run = self.run
        run.metrics.update(run.logged)
        kind = "fit" if run.logged.stage == "train" else run.stage
        run.logged = ResultCollection(run.stage, kind)
        return run.logged

    def evaluation_step(self, values: ResultCollection) -> None:
        """Write a row of this batch's values, over the number of evaluation batches so far."""
        if self.run.stage == "sanity_check":
            return
        rows, key = self.run.metrics.rows, (values.entry_point, values.loader or 0)
        seen = rows.get(key, 0)
        rows[key] = seen + 1
        if self._loggers():
            self.log_row(self._step_values(values, values.loader), step=seen)

    def end_evaluation(
        self, values: ResultCollection, loaders: list[dict[str, torch.Tensor]]
    ) -> list[dict[str, float]]:
        """Log the row of an evaluation, and return its results for each loader.

        What its last hook logged belongs to all of them.
        """
        last = self.reduce_epoch(values)
        if self.run.stage == "sanity_check":
            return [{} for _ in loaders]
        row: dict[str, torch.Tensor] = {}
        for results in loaders:
            row |= results
        row |= last
        self.log_row(row)
        read = read_scalars(row)
        return [{name: read[name] for name in {**results, **last}} for results in loaders]


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def load_logged_state(
    values: ResultCollection, ranks: list[dict[str, Any]], strategy: Strategy, module: nn.Module
) -> None:
    """Take up each rank's part; if there are more or fewer ranks now, rank 0 takes all of them.

    What a metric gathered cannot be merged, so with other ranks it begins its epoch again, and a warning says so. Until the epoch's end
    the newest value of a name stays that of its last step, not the mean so far.
    """
    values.in_batches = True
    if len(ranks) == strategy.world_size:
        values.load_state_dict(ranks[strategy.global_rank], module)
        return
    metrics = {name for rank in ranks for table in rank.values() for name, saved in table.items() if "metric" in saved}
    if metrics:
        rank_zero_warn(
            f"{', '.join(sorted(metrics))}: metrics of {len(ranks)} processes cannot be restored to {strategy.world_size}; they begin "
            "this epoch again"
        )
    for rank in ranks if strategy.is_global_zero else ():
        part = ResultCollection("train")
        plain = {hook: {n: saved for n, saved in table.items() if n not in metrics} for hook, table in rank.items()}
        part.load_state_dict(plain, module)
        values.merge(part)
