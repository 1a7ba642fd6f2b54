"""What a trainer gets when nothing else was asked for: settings, callbacks, loggers, and a table of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.registry import load_external_callbacks
from arclight.trainer.callback import Callback, Checkpoint
from arclight.trainer.callbacks.pause import Pause
from arclight.trainer.loop.hooks import overridden

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def default_callbacks(trainer: Trainer, given: Callback | list[Callback] | None) -> list[Callback]:
    """The user's callbacks and, unless turned off, a checkpoint after every epoch, a progress bar and a model summary."""
    from arclight.trainer.callbacks import (
        ModelCheckpoint,
        ModelSummary,
        RichModelSummary,
        RichProgressBar,
        Timer,
        TQDMProgressBar,
    )

    chosen, settings = trainer.given, trainer.settings
    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    _check_callbacks(callbacks, chosen)
    if settings.max_time is not None:
        if any(isinstance(c, Timer) for c in callbacks):
            trainer.say("Ignoring `Trainer(max_time=...)`, callbacks list already contains a Timer.")
        else:
            callbacks.append(Timer(duration=settings.max_time, interval="step"))
    if (
        chosen["enable_checkpointing"] is not False
        and not trainer.fast_dev_run
        and not any(isinstance(c, Checkpoint) for c in callbacks)
    ):
        callbacks.append(ModelCheckpoint())
    bar = settings.enable_progress_bar
    if bar and not any(is_progress_bar(c) for c in callbacks):
        callbacks.append(RichProgressBar())
    summary = bar if chosen["enable_model_summary"] is None else chosen["enable_model_summary"]
    if summary and not any(isinstance(c, ModelSummary) for c in callbacks):
        plain = any(isinstance(c, TQDMProgressBar) for c in callbacks)
        callbacks.append(ModelSummary() if plain else RichModelSummary())
    callbacks += load_external_callbacks(trainer.conventions.callbacks_factory)
    check_state_keys(callbacks)
    return checkpoints_last(callbacks)


def _check_callbacks(callbacks: list[Callback], chosen: dict[str, Any]) -> None:
    if chosen["enable_checkpointing"] is False and any(isinstance(c, Checkpoint) for c in callbacks):
        raise MisconfigurationError(
            "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks list: leave out one of them"
        )
    bars = [c for c in callbacks if is_progress_bar(c)]
    if len(bars) > 1:
        raise MisconfigurationError(
            "You added multiple progress bar callbacks to the Trainer, but currently only one progress bar is supported: "
            + ", ".join(type(c).__name__ for c in bars)
        )
    if bars and chosen["enable_progress_bar"] is False:
        raise MisconfigurationError(
            f"Trainer was configured with `enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks list: "
            "leave out one of them"
        )


def check_state_keys(callbacks: list[Callback]) -> None:
    """Raise RuntimeError where two callbacks would save their state under one name."""
    keys: set[str] = set()
    for callback in callbacks:
        if not overridden(callback, "state_dict", Callback):
            continue
        if callback.state_key in keys:
            raise RuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with the state_key "
                f"{callback.state_key!r}: only one of them could be resumed. Leave one out, or make their `state_key` differ"
            )
        keys.add(callback.state_key)


def is_progress_bar(callback: Callback) -> bool:
    from arclight.trainer.callbacks import ProgressBar

    return isinstance(callback, ProgressBar)


def checkpoints_last(callbacks: list[Callback]) -> list[Callback]:
    """In the order given, but what saves comes after all whose state it saves, and what breaks a fit off after those."""
    return sorted(callbacks, key=lambda callback: (isinstance(callback, Pause), isinstance(callback, Checkpoint)))


def show_results(stage: str, results: list[dict[str, float]]) -> None:
    """A table of an evaluation's values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=stage, title_justify="left")
    table.add_column("metric")
    for number in range(len(results)):
        table.add_column(f"loader {number}" if len(results) > 1 else "value", justify="right")
    for name in dict.fromkeys(key for result in results for key in result):
        table.add_row(name, *(f"{result[name]:.5g}" if name in result else "" for result in results))
    Console().print(table)
