"""What a trainer gets when nothing else was asked for: settings, callbacks, loggers, and a table of results."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from arclight.trainer.callback import Callback, Checkpoint
from arclight.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


_LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "max_steps": -1,
    "num_sanity_val_steps": -1,
}


def make_settings(given: dict[str, Any], fast_dev_run: int | bool) -> TrainerSettings:
    """Checked settings. Raises TypeError naming the nearest field for an unknown argument."""
    names = [f.name for f in dataclasses.fields(TrainerSettings)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise TypeError(f"Trainer has no argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    settings = TrainerSettings(**given)
    if fast_dev_run:
        count = int(fast_dev_run)
        settings = dataclasses.replace(
            settings,
            max_epochs=1,
            max_steps=count,
            limit_train_batches=count,
            limit_val_batches=count,
            num_sanity_val_steps=0,
            val_check_interval=None,
            check_val_every_n_epoch=1,
        )
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if settings.val_check_interval is not None and settings.val_check_interval <= 0:
        raise ValueError(f"val_check_interval must be above 0, got {settings.val_check_interval}")
    return settings


def default_callbacks(
    trainer: Trainer, given: Callback | list[Callback] | None, checkpointing: bool | None, summary: bool | None
) -> list[Callback]:
    """The user's callbacks and, unless turned off, a checkpoint after every epoch, a progress bar and a model summary."""
    from arclight.trainer.callbacks import ModelCheckpoint, ModelSummary, RichProgressBar

    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    if checkpointing is False and any(isinstance(c, Checkpoint) for c in callbacks):
        raise ValueError("enable_checkpointing=False, yet a checkpoint callback was given; leave out one of them")
    if (
        checkpointing is not False
        and not trainer.fast_dev_run
        and not any(isinstance(c, ModelCheckpoint) for c in callbacks)
    ):
        callbacks.append(ModelCheckpoint())
    if trainer.settings.enable_progress_bar and not any(isinstance(c, RichProgressBar) for c in callbacks):
        callbacks.append(RichProgressBar())
    if (
        summary is not False
        and trainer.settings.enable_progress_bar
        and not any(isinstance(c, ModelSummary) for c in callbacks)
    ):
        callbacks.append(ModelSummary())
    return checkpoints_last(callbacks)


def checkpoints_last(callbacks: list[Callback]) -> list[Callback]:
    """In the order given, but what saves comes after all whose state it saves."""
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))


def make_loggers(trainer: Trainer, choice: Any) -> list[Any]:
    """Loggers from the ``logger`` argument."""
    if choice is False:
        return []
    if choice is None or choice is True:
        from arclight.trainer.loggers import CSVLogger

        choice = CSVLogger()
    loggers = list(choice) if isinstance(choice, (list, tuple)) else [choice]
    for logger in loggers:
        if getattr(logger, "needs_folder", False):
            logger.use_folder(trainer.run_folder.path)
    return loggers


def show_results(stage: str, results: list[dict[str, float]]) -> None:
    """A table of an evaluation's values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=stage, title_justify="left")
    table.add_column("value")
    for number in range(len(results)):
        table.add_column(f"loader {number}" if len(results) > 1 else "", justify="right")
    for name in dict.fromkeys(key for result in results for key in result):
        table.add_row(name, *(f"{result[name]:.5g}" if name in result else "" for result in results))
    Console().print(table)
