"""Progress in the terminal: one calm line for where training is, one for its metrics."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.progress_clock import ProgressClock, clock_text, rate_text, value_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

PLAIN_INTERVAL = 10.0
"""Seconds between two lines where output is not a terminal."""

_LABELS = {"sanity_check": "Sanity check", "validate": "Validate", "test": "Test", "predict": "Predict"}


@dataclass(frozen=True, kw_only=True)
class RichProgressBarTheme:
    """Rich styles of the display's parts."""

    description: str = "bold"
    progress_bar: str = "cyan"
    progress_bar_finished: str = "green"
    progress_bar_pulse: str = "cyan"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim"
    metrics: str = ""
    metrics_name: str = "dim"


class RichProgressBar(Callback):
    """Epoch, batches, speed, time left and the metrics logged with ``prog_bar=True``, drawn at most ten times a second.

    It reads numbers that are on the host already and hooks into no step. Where stderr is not a terminal it writes
    one plain line every ten seconds and one at the end. ``leave`` keeps a line for each epoch; ``refresh_rate=0``
    turns the display off (other values mean on: redrawing goes by time, not by batches).
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.refresh_rate, self.leave, self.theme = refresh_rate, leave, theme or RichProgressBarTheme()
        self._console_arguments = {"stderr": True, **(console_kwargs or {})}
        self._console: Console | None = None
        self._live: Live | None = None
        self._clock = ProgressClock(0)
        self._eval_clock = ProgressClock(0)
        self._plain_at = 0.0
        self._fitting = self._finished = False

    def get_metrics(self, trainer: Trainer, pl_module: Module) -> dict[str, Any]:
        """Name and value of what is shown; override to add or leave out some."""
        return dict(trainer.progress_bar_metrics)

    # -- fit -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting, self._finished = True, False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock = ProgressClock(trainer.progress.batches)
        self._start(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.update(trainer.progress.batches)
        self._show(trainer, pl_module)
        if self.leave and self._live is not None:
            self._live.console.print(self._drawing(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting, self._finished = False, True
        self._show(trainer, pl_module, force=True)
        self._stop()

    def on_progress(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.update(trainer.progress.batches)
        self._eval_clock.update(trainer.eval_batch)
        self._show(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._fitting = False
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._stop()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin_evaluation(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_evaluation(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin_evaluation(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_evaluation(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin_evaluation(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end_evaluation(trainer, pl_module)

    def _begin_evaluation(self, trainer: Trainer) -> None:
        self._clock.pause()
        self._eval_clock, self._finished = ProgressClock(0), False
        self._start(trainer)

    def _end_evaluation(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.resume(trainer.progress.batches)
        if not self._fitting:
            self._finished = True
            self._show(trainer, pl_module, force=True)
            self._stop()

    # -- display ---------------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer) -> None:
        if self._console is not None or not trainer.is_global_zero or not self.refresh_rate:
            return
        from rich.console import Console
        from rich.live import Live

        self._console, self._plain_at = Console(**self._console_arguments), time.monotonic() + PLAIN_INTERVAL
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = self._console = None

    def _show(self, trainer: Trainer, pl_module: Module, force: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._drawing(trainer, pl_module), refresh=True)
        elif self._console is not None and (force or time.monotonic() >= self._plain_at):
            self._plain_at = time.monotonic() + PLAIN_INTERVAL
            self._console.print(self._line(trainer, pl_module), soft_wrap=True, highlight=False, markup=False)

    def _drawing(self, trainer: Trainer, pl_module: Module) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        theme, (label, done, total, speed, clock) = self.theme, self._numbers(trainer)
        bar = ProgressBar(
            total=total if math.isfinite(total) else None,
            completed=done,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        for width in (0, 9, 8):  # the least widths keep the bar from changing its length
            table.add_column(no_wrap=True, justify="right", min_width=width)
        table.add_row(
            Text(label, theme.description),
            bar,
            Text(count_text(done, total), theme.batch_progress),
            Text(speed, theme.processing_speed),
            Text(clock, theme.time),
        )
        metrics = Text()
        for name, value in self.get_metrics(trainer, pl_module).items():
            metrics.append("   " if metrics else "")
            metrics.append(f"{name}\u00a0", theme.metrics_name).append(value_text(value), theme.metrics)
        return Group(table, Padding(metrics, (0, 0, 0, 2))) if metrics else table

    def _line(self, trainer: Trainer, pl_module: Module) -> str:
        label, done, total, speed, clock = self._numbers(trainer)
        metrics = [f"{name} {value_text(value)}" for name, value in self.get_metrics(trainer, pl_module).items()]
        return "  ".join(part for part in (label, count_text(done, total), speed, clock, *metrics) if part)

    def _numbers(self, trainer: Trainer) -> tuple[str, int, float, str, str]:
        """Label, batches done, batches in all, speed, and time left (or taken, once finished)."""
        label, done, total = epoch_text(trainer), trainer.progress.batch, trainer.num_training_batches
        clock, whole = self._clock, total_batches(trainer)
        if trainer.stage in _LABELS:
            name = _LABELS[trainer.stage]
            label = f"{label}  {name.lower()}" if self._fitting and trainer.stage == "validate" else name
            done, total, clock = trainer.eval_batch, sum(trainer.num_eval_batches), self._eval_clock
            whole = total
        elif self._finished and done == 0 and math.isfinite(total):
            done = int(total)  # the last epoch is complete, and the count stands at the start of the next
        time_text = clock_text(clock.elapsed) if self._finished else f"eta {clock_text(clock.left(whole))}"
        return label, done, total, rate_text(clock.rate), time_text


def epoch_text(trainer: Trainer) -> str:
    epoch, last = trainer.current_epoch + 1, trainer.max_epochs
    return f"Epoch {epoch}" if last == -1 or last is None else f"Epoch {min(epoch, last)}/{last}"


def count_text(done: int, total: float) -> str:
    return f"{done:>{len(f'{int(total):,}')},}/{int(total):,}" if math.isfinite(total) else f"{done:,}"


def total_batches(trainer: Trainer) -> float:
    """Batches of the whole fit; infinity where neither limit nor length is known."""
    total = math.inf
    if trainer.max_epochs not in (-1, None) and math.isfinite(trainer.num_training_batches):
        total = trainer.max_epochs * trainer.num_training_batches
    if trainer.max_steps != -1:
        progress = trainer.progress
        total = min(
            total,
            progress.batches + (trainer.max_steps - progress.global_step) * trainer.accumulate_grad_batches,
        )
    return total
