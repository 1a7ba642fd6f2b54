"""What a run tells the outside: rows for loggers, metrics for callbacks, an alarm for a loss that is no number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from arclight.trainer.logged import LoggedValues
    from arclight.trainer.trainer import Trainer


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or infinite."""


def check_finite(trainer: Trainer) -> None:
    """Raise NonFiniteLossError if the newest loss is NaN or infinite.

    Called at each logging interval, at epoch ends and before saving: such a loss spoils the weights for good,
    so it cannot be missed for long, and no checkpoint is ever written from a spoiled model.
    """
    if trainer.last_loss is None or math.isfinite(loss := float(trainer.last_loss.detach())):
        return
    progress = trainer.progress
    raise NonFiniteLossError(
        f"the loss is {loss} at step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch - 1}, at most "
        f"{trainer.log_every_n_steps} steps after it first was): lower the learning rate, set gradient_clip_val, or look for bad input; "
        "the checkpoints before this point are unharmed"
    )


def log_step(trainer: Trainer) -> None:
    """Send the newest step values to the loggers, in one transfer from the device."""
    check_finite(trainer)
    if not trainer.loggers:
        return
    values = trainer.logged.last(lambda entry: entry.on_step and entry.logger)
    send(trainer, values)


def send(trainer: Trainer, values: dict[str, float]) -> None:
    """One row for every logger (rank 0 writes)."""
    if not values:
        return
    trainer.logged_metrics.update({name: torch.tensor(value) for name, value in values.items()})
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.progress.epoch, **values}, trainer.progress.global_step)


def publish_epoch(trainer: Trainer, values: LoggedValues) -> dict[str, float]:
    """Reduce a finished epoch's values over all ranks; make them the callbacks' metrics and a row of the loggers."""
    results = values.epoch(trainer.strategy)
    for entry, value in results:
        trainer.epoch_metrics[entry.epoch_name] = value
        if entry.on_step and entry.on_epoch:
            trainer.epoch_metrics[entry.name] = value
    numbers = [float(value) for _, value in results]
    trainer.bar_metrics.update({e.epoch_name: v for (e, _), v in zip(results, numbers, strict=True) if e.prog_bar})
    send(trainer, {entry.epoch_name: v for (entry, _), v in zip(results, numbers, strict=True) if entry.logger})
    return {entry.epoch_name: v for (entry, _), v in zip(results, numbers, strict=True)}


def end_epoch(trainer: Trainer) -> None:
    """The hooks at an epoch's end, with what they log; the callbacks that monitor come last and see it all."""
    trainer.call("on_train_epoch_end", monitors=False)
    publish_epoch(trainer, trainer.logged)
    trainer.call_monitors("on_train_epoch_end")
