"""What a run tells the outside: rows for loggers, metrics for callbacks, an alarm for a loss that is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.logging.metrics import Metrics, read_scalars, to_float32
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.logging.sync import reduce_epoch, reduce_steps
from arclight.trainer.loop.progress import TrainerFn

if TYPE_CHECKING:
    import torch

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite."""


def check_finite(trainer: Trainer) -> None:
    """Raise NonFiniteLossError if the newest loss is NaN or infinite.

    Called at each logging interval, at epoch ends and before saving: such a loss spoils the weights for good,
    so it cannot be missed for long, and no checkpoint is ever written from a spoiled model.
    """
    if trainer.last_loss is None or not trainer.conventions.stop_on_nonfinite:
        return
    if math.isfinite(loss := float(trainer.last_loss.detach())):
        return
    from arclight.trainer.diagnosis import diagnose

    progress, trainer.last_loss = trainer.progress, None
    said = (
        f"the loss is {loss} at step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch - 1}, at most "
        f"{trainer.log_every_n_steps} steps after it first was): lower the learning rate, set gradient_clip_val, or look for bad input; "
        "the checkpoints before this point are unharmed"
    )
    found = diagnose(trainer)
    raise NonFiniteLossError(f"{said}. {found[0].upper()}{found[1:]}" if found else said)


# -- rows ----------------------------------------------------------------------------------------------------------------


def log_step(trainer: Trainer) -> None:
    """Send the newest step values to the loggers, in one transfer from the device."""
    check_finite(trainer)
    values = trainer.logged
    reduce_steps(values.entries(), trainer.strategy)
    if trainer.loggers:
        send(trainer, _step_values(trainer, values))


def _step_values(trainer: Trainer, values: ResultCollection, loader: int | None = None) -> dict[str, torch.Tensor]:
    trainer.metrics.take_steps(values)
    return {
        entry.step_name: to_float32(entry.last)
        for entry in values.entries()
        if entry.last is not None and entry.settings.logger and entry.loader == loader
    }


def send(trainer: Trainer, values: dict[str, torch.Tensor], step: int | None = None) -> None:
    """One row for every logger, at ``step`` or, with the epoch beside it, at the trainer's. Loggers choose their ranks.

    A value logged under the name ``step`` takes the place of the trainer's step.
    """
    if not values or not trainer.loggers:
        return
    row: dict[str, Any] = dict(read_scalars(values))
    if step is None:
        if "step" in row:
            step = int(row.pop("step"))
        else:
            row = {"epoch": trainer.progress.epoch, **row}
            step = row_number(trainer)
    for logger in trainer.loggers:
        logger.log_metrics(metrics=dict(row), step=step)
        logger.save()


def row_number(trainer: Trainer) -> int:
    """The x-axis of a row: updates completed, or the number of the newest one counted from 0."""
    progress, module = trainer.progress, trainer.lightning_module
    if not trainer.conventions.zero_based_rows:
        return progress.global_step
    steps = progress.global_step if module.automatic_optimization else progress.batches
    return max(0, steps - 1) if trainer.state.fn == TrainerFn.FITTING else steps


# -- the end of an epoch -------------------------------------------------------------------------------------------------


def row_of_step(trainer: Trainer, step: int) -> int:
    """Number of the loggers' row that belongs to the ``step``-th step, counted from 1."""
    return step - trainer.conventions.zero_based_rows


def publish(trainer: Trainer, values: ResultCollection) -> dict[str, torch.Tensor]:
    """Reduce what is new over all ranks and show it; those of the values that loggers are to see."""
    entries = reduce_epoch(values, trainer.strategy, trainer.lightning_module)
    if values.in_batches:
        trainer.metrics.take_steps(values)
        values.in_batches = False
    trainer.metrics.take_epoch(entries)
    return {e.epoch_name: e.result for e in entries if e.result is not None and e.settings.logger}


def end_batches(trainer: Trainer, values: ResultCollection) -> dict[str, torch.Tensor]:
    """The batches of an epoch, or of one of its loaders, are over: from now on its values are what there is to see."""
    values.batch.set(None)
    return publish(trainer, values)


def end_epoch(trainer: Trainer, schedulers: Sequence[Callable[[], Any]] = ()) -> None:
    """The hooks at an epoch's end, with what they log, and the schedulers that watch it.

    The callbacks that monitor come last and see it all.
    """
    values = trainer.logged
    row = end_batches(trainer, values)
    trainer.call("on_train_epoch_end", monitors=False)
    send(trainer, row | publish(trainer, values))
    for step in schedulers:
        step()
    trainer.call_monitors("on_train_epoch_end")
    send(trainer, publish(trainer, values))


# -- evaluation ----------------------------------------------------------------------------------------------------------


def begin_evaluation(trainer: Trainer) -> ResultCollection:
    """A fresh place for an evaluation's values; those of the training that it interrupts are put on show first."""
    trainer.metrics.look(trainer.logged)
    kind = "fit" if trainer.logged.stage == "train" else trainer.stage
    trainer.logged = ResultCollection(trainer.stage, kind)
    return trainer.logged


def evaluation_step(trainer: Trainer, values: ResultCollection) -> None:
    """A row of this batch's values, over the number of evaluation batches so far."""
    if trainer.stage == "sanity_check":
        return
    key = (values.entry_point, values.loader or 0)
    seen = trainer.metrics.rows.get(key, 0)
    trainer.metrics.rows[key] = seen + 1
    if trainer.loggers:
        send(trainer, _step_values(trainer, values, values.loader), step=seen)


def end_evaluation(
    trainer: Trainer, values: ResultCollection, loaders: list[dict[str, torch.Tensor]]
) -> list[dict[str, float]]:
    """The row of an evaluation, and its results for each loader; what its last hook logged belongs to all of them."""
    last = publish(trainer, values)
    if trainer.stage == "sanity_check":
        return [{} for _ in loaders]
    row: dict[str, torch.Tensor] = {}
    for results in loaders:
        row |= results
    row |= last
    send(trainer, row)
    read = read_scalars(row)
    return [{name: read[name] for name in {**results, **last}} for results in loaders]


# -- callbacks that log ----------------------------------------------------------------------------------------------------


def attach_log(trainer: Trainer, module: Module) -> None:
    """For the time of a run, ``self.log`` and ``self.log_dict`` of each callback are the module's."""
    for callback in trainer.callbacks:
        for name in ("log", "log_dict"):
            if not hasattr(callback, name):
                setattr(callback, name, getattr(module, name))


def detach_log(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        for name in ("log", "log_dict"):
            if isinstance(getattr(vars(callback).get(name), "__self__", None), nn.Module):
                delattr(callback, name)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def logged_state(trainer: Trainer) -> list[dict[str, Any]]:
    """What every rank has logged in the epoch under way. A collective."""
    return trainer.strategy.all_gather_object(trainer.training_values.state_dict())


def load_logged_state(trainer: Trainer, ranks: list[dict[str, Any]]) -> None:
    """Take up each rank's part; where there are more or fewer ranks now, rank 0 takes all of them.

    What a metric gathered cannot be put together, so with other ranks it begins its epoch anew, and a warning says so.
    """
    module = trainer.lightning_module
    if len(ranks) == trainer.world_size:
        trainer.training_values.load_state_dict(ranks[trainer.global_rank], module)
        return
    metrics = {name for rank in ranks for table in rank.values() for name, saved in table.items() if "metric" in saved}
    if metrics:
        rank_zero_warn(
            f"{', '.join(sorted(metrics))}: metrics of {len(ranks)} processes cannot be restored to {trainer.world_size}; they begin "
            "this epoch anew"
        )
    for rank in ranks if trainer.is_global_zero else ():
        part = ResultCollection("train")
        plain = {hook: {n: saved for n, saved in table.items() if n not in metrics} for hook, table in rank.items()}
        part.load_state_dict(plain, module)
        trainer.training_values.absorb(part)


class LoggedMetrics:
    """The part of a Trainer that shows what was logged. Values are read when asked for, so that a step pays nothing."""

    metrics: Metrics
    logged: ResultCollection

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Newest value of every logged name: in training the step's, from the epoch's end on the epoch's."""
        return self.metrics.look(self.logged).callback

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Newest values for loggers: ``x_step`` and ``x_epoch`` where both are logged."""
        return self.metrics.look(self.logged).logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Newest values logged with ``prog_bar=True``, read from the device."""
        return self.metrics.look(self.logged).bar_values()
