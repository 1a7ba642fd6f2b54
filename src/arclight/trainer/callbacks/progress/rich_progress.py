"""Show progress in the terminal with rich: a line for the position, a line for metrics.

The Trainer adds it unless ``enable_progress_bar`` is False or users pass a bar. Class names, arguments and attributes are Lightning's;
what the lines look like is free.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from arclight._intervals import Interval, check
from arclight.fabric.batches import map_tensors
from arclight.trainer.callbacks.progress.progress_bar import ProgressBar
from arclight.trainer.callbacks.progress.timing import ProgressClock, clock_text, rate_text

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


Styled = str | Style


@dataclass
class RichProgressBarTheme:
    """Rich styles of the display's parts, and how metrics are written."""

    description: Styled = "bold"
    progress_bar: Styled = "cyan"
    progress_bar_finished: Styled = "green"
    progress_bar_pulse: Styled = "cyan"
    batch_progress: Styled = ""
    time: Styled = "dim"
    processing_speed: Styled = "dim"
    metrics: Styled = ""
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"
    """Format of numbers that are no integers; one that it would show as zero gets three significant digits."""
    metrics_name: Styled = "dim"


class FieldColumn(ProgressColumn):
    """Column that shows a text field of the task, at least ``width`` wide."""

    def __init__(self, field: str, style: Styled, width: int = 0) -> None:
        self.field, self.style = field, style
        super().__init__(Column(no_wrap=True, justify="right", min_width=width))

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get(self.field, "")), self.style)


class BatchesProcessedColumn(ProgressColumn):
    """Batches done, of how many."""

    def __init__(self, style: Styled, width: int = 0) -> None:
        self.style = style
        super().__init__(Column(no_wrap=True, justify="right", min_width=width))

    def render(self, task: Task) -> Text:
        return Text(count_text(int(task.completed), math.inf if task.total is None else task.total), self.style)


class MetricsTextColumn(ProgressColumn):
    """Names and values of the metrics; drawn below the bars, if there is room for many."""

    def __init__(self, theme: RichProgressBarTheme) -> None:
        self.theme = theme
        self.metrics: dict[str, Any] = {}
        super().__init__()

    def render(self, task: Task) -> Text:
        text = Text()
        for name, value in self.metrics.items():
            text.append(self.theme.metrics_text_delimiter if text else "")
            text.append(f"{name}: ", self.theme.metrics_name)
            text.append(value_text(value, self.theme.metrics_format), self.theme.metrics)
        return text


class CustomProgress(Progress):
    """Rows of the visible tasks, then the first one's metrics on lines of their own."""

    def get_renderables(self) -> Iterable[RenderableType]:
        tasks = [task for task in self.tasks if task.visible]
        if not tasks:
            return
        *columns, metrics = self.columns
        table = Table.grid(*(_heading(column) for column in columns), padding=(0, 2), expand=True)
        for task in tasks:
            table.add_row(*(_cell(column, task) for column in columns))
        yield table
        if text := _cell(metrics, tasks[0]):
            yield Padding(text, (0, 0, 0, 2))


def standard_columns(theme: RichProgressBarTheme, description: int = 0, batches: int = 0) -> list[ProgressColumn]:
    """Return the columns for description, bar, batches, speed and time.

    The least widths (characters) keep the bar in place when another one takes its turn.
    """
    return [
        TextColumn(
            "{task.description}", style=theme.description, table_column=Column(no_wrap=True, min_width=description)
        ),
        BarColumn(
            bar_width=None,
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
            table_column=Column(ratio=1),
        ),
        BatchesProcessedColumn(theme.batch_progress, batches),
        FieldColumn("speed", theme.processing_speed, width=10),
        FieldColumn("time", theme.time, width=8),
    ]


def _heading(column: str | ProgressColumn) -> Column:
    return Column(no_wrap=True) if isinstance(column, str) else column.get_table_column().copy()


def _cell(column: str | ProgressColumn, task: Task) -> RenderableType:
    return column.format(task=task) if isinstance(column, str) else column(task)


def count_text(done: int, total: float) -> str:
    """Format ``done`` of ``total`` with equal width; ``done`` alone if the total is infinite."""
    return f"{done:>{len(f'{int(total):,}')},}/{int(total):,}" if math.isfinite(total) else f"{done:,}"


def value_text(value: object, number_format: str) -> str:
    """Return a metric as text."""
    if isinstance(value, (str, int)) or not isinstance(value, float):
        return str(value)
    text = f"{value:{number_format}}"
    return f"{value:.3g}" if value and not text.strip("-+0.,") else text


PLAIN_INTERVAL = 10.0
"""Seconds between two lines if output is not a terminal."""

_BATCH_HOOKS = frozenset(f"on_{stage}_batch_end" for stage in ("train", "validation", "test", "predict"))


class RichProgressBar(ProgressBar):
    """Epoch, batches, speed, time left and the metrics logged with ``prog_bar=True``.

    ``refresh_rate``: pictures per second, at most ten; 0 turns the display off. It reads numbers that are on the host
    already and hooks into no step, but under ``metrics_by_batch`` (Lightning, on a CPU) into each. If the console is not
    a terminal it writes one plain line every ten seconds and one at the end. ``leave`` keeps a line for each epoch.
    ``theme``: styles and number format. ``console_kwargs``: arguments of ``rich.console.Console`` (stderr by default).

    A subclass may override :meth:`get_metrics`, :meth:`configure_columns` and the descriptions.
    """

    def __init__(
        self,
        refresh_rate: float = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check("refresh_rate", refresh_rate, Annotated[float, Interval(ge=0)])  # infinity draws the end only
        self._refresh_rate, self._leave, self.theme = refresh_rate, leave, theme or RichProgressBarTheme()
        self._console_kwargs = {"stderr": True, **(console_kwargs or {})}
        self._enabled = True
        self.progress: Progress | None = None
        """The display of this run or, after it, of the newest; its tasks are the bars."""
        self._running = False
        self._reset_progress_bar_ids()
        self._clock = self._eval_clock = ProgressClock(0)
        self._drawn_at = self._plain_at = 0.0
        self._by_batch = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None, "_running": False}

    def _reset_progress_bar_ids(self) -> None:
        self.train_progress_bar_id: TaskID | None = None
        self.val_sanity_progress_bar_id: TaskID | None = None
        self.val_progress_bar_id: TaskID | None = None
        self.test_progress_bar_id: TaskID | None = None
        self.predict_progress_bar_id: TaskID | None = None

    # -- settings --------------------------------------------------------------------------------------------------

    @property
    def refresh_rate(self) -> float:
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self._refresh_rate > 0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    @property
    def train_progress_bar(self) -> Task:
        return self._task(self.train_progress_bar_id)

    @property
    def val_sanity_check_bar(self) -> Task:
        return self._task(self.val_sanity_progress_bar_id)

    @property
    def val_progress_bar(self) -> Task:
        return self._task(self.val_progress_bar_id)

    @property
    def test_progress_bar(self) -> Task:
        return self._task(self.test_progress_bar_id)

    def _task(self, number: TaskID | None) -> Task:
        assert self.progress is not None, "no run has begun"
        return next(task for task in self.progress.tasks if task.id == number)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return the bars' columns; each task has the fields ``speed`` and ``time``."""
        if trainer.state.fn != "fit":
            return standard_columns(self.theme)
        words = (self.validation_description, self._get_train_description((trainer.max_epochs or 1) - 1))
        batches = count_text(0, trainer.num_training_batches)
        return standard_columns(self.theme, max(map(len, words)), len(batches))

    def get_metrics(self, trainer: Trainer, pl_module: Module) -> dict[str, Any]:
        """Return the names and values to show, as plain numbers."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: map_tensors(value, lambda tensor: tensor.item()) for name, value in metrics.items()}  # type: ignore[arg-type, return-value]

    def _get_train_description(self, current_epoch: int) -> str:
        last = self.trainer.max_epochs
        epoch = current_epoch + 1
        return f"Epoch {epoch}" if last in (-1, None) else f"Epoch {min(epoch, last)}/{last}"

    # -- fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # Reading a metric from an accelerator waits for it, so there it goes by time whatever the convention.
        self._by_batch = trainer.behavior.metrics_by_batch and trainer.strategy.root_device.type == "cpu"
        own = {name for name in _BATCH_HOOKS if getattr(type(self), name) is not getattr(RichProgressBar, name)}
        self.unused_hooks = frozenset() if self._by_batch else _BATCH_HOOKS - own

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._init_progress(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._show_metrics({})  # a few batches of an untrained model: not a result to show

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock = ProgressClock(trainer.progress.batches)
        self._init_progress(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self.progress is None or not self._running:
            return
        description = self._get_train_description(trainer.current_epoch)
        total, done = _known(self.total_train_batches), trainer.progress.batch
        if self.train_progress_bar_id is not None and self._leave:
            self.progress.remove_task(self.train_progress_bar_id)
            self.train_progress_bar_id = None
        if self.train_progress_bar_id is None:
            self.train_progress_bar_id = self.progress.add_task(description, total=total, completed=done)
        else:
            self.progress.reset(
                self.train_progress_bar_id, total=total, completed=done, description=description, visible=True
            )

    def on_progress(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.update(trainer.progress.batches)
        self._eval_clock.update(trainer.run_state.eval_batch)
        now = time.monotonic()
        if self._running and now >= self._drawn_at + 1 / self._refresh_rate - 0.01:
            self._drawn_at = now
            if not self._by_batch:
                self._update_metrics(trainer, pl_module)
            self._show(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.update(trainer.progress.batches)
        self._update_metrics(trainer, pl_module)
        self._show(trainer)
        if self._leave and self._running and self.progress is not None and self.progress.live.is_started:
            self.progress.console.print(self.progress.get_renderable())

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._by_batch:
            self._update_metrics(trainer, pl_module)
        self._show(trainer, finished=True)
        self._stop()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        name = "val_sanity_progress_bar_id" if trainer.sanity_checking else "val_progress_bar_id"
        description = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        self._begin_evaluation(trainer, name, description)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin_evaluation(trainer, "test_progress_bar_id", self.test_description)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._begin_evaluation(trainer, "predict_progress_bar_id", self.predict_description)

    def _begin_evaluation(self, trainer: Trainer, name: str, description: str) -> None:
        """Show a bar for an evaluation, in the place of the training's while it runs."""
        self._clock.pause()
        self._eval_clock = ProgressClock(0)
        self._init_progress(trainer)
        if self.progress is None or not self._running:
            return
        if trainer.validating and self.train_progress_bar_id is not None:
            self.train_progress_bar.visible = False
        total = _known(sum(trainer.num_eval_batches))
        if (number := getattr(self, name)) is None:
            setattr(self, name, self.progress.add_task(description, total=total))
        else:
            self.progress.reset(number, total=total, description=description, visible=True)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock.resume(trainer.progress.batches)
        if trainer.state.fn != "fit":
            self._show(trainer, finished=True)
            self._stop()
            return
        self._update_metrics(trainer, pl_module)
        number = self.val_sanity_progress_bar_id if trainer.sanity_checking else self.val_progress_bar_id
        if self.progress is not None and self._running and number is not None:
            self.progress.update(number, completed=trainer.run_state.eval_batch, visible=False)
            if self.train_progress_bar_id is not None:
                self.train_progress_bar.visible = True

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._show(trainer, finished=True)
        self._stop()

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._show(trainer, finished=True)
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._stop()

    # -- every batch, by Lightning's convention --------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._by_batch:
            self._update_metrics(trainer, pl_module)
            self._count(self.train_progress_bar_id, batch_idx + 1)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(self._current(trainer), trainer.run_state.eval_batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(self._current(trainer), trainer.run_state.eval_batch)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(self._current(trainer), trainer.run_state.eval_batch)

    def _count(self, number: TaskID | None, done: int) -> None:
        if self._by_batch and self._running and self.progress is not None and number is not None:
            self.progress.update(number, completed=done)

    # -- display ---------------------------------------------------------------------------------------------------

    def _init_progress(self, trainer: Trainer) -> None:
        if self._running or not self.is_enabled:
            return
        self._reset_progress_bar_ids()
        console = Console(**self._console_kwargs)
        columns = [*self.configure_columns(trainer), MetricsTextColumn(self.theme)]
        self.progress = CustomProgress(*columns, console=console, auto_refresh=False)
        self._running, self._plain_at = True, time.monotonic() + PLAIN_INTERVAL
        if console.is_terminal:
            self.progress.start()

    def _stop(self) -> None:
        if self.progress is not None and self._running:
            self._running = False
            if self.progress.live.is_started:
                self.progress.stop()

    def _update_metrics(self, trainer: Trainer, pl_module: Module) -> None:
        if self._running:
            self._show_metrics(self.get_metrics(trainer, pl_module))

    def _show_metrics(self, metrics: dict[str, Any]) -> None:
        if self.progress is not None and self._running:
            column = self.progress.columns[-1]
            assert isinstance(column, MetricsTextColumn), "the last column is the metrics' one"
            column.metrics = metrics

    def _show(self, trainer: Trainer, finished: bool = False) -> None:
        """Update the running bar and draw it: in place, or as a line when one is due."""
        number = self._current(trainer)
        if self.progress is None or not self._running or number is None:
            return
        training = number == self.train_progress_bar_id
        clock = self._clock if training else self._eval_clock
        task = self._task(number)
        done, total = trainer.progress.batch if training else trainer.run_state.eval_batch, task.total
        if finished and training and not done and total is not None:
            done = int(total)  # the last epoch is complete, and the count stands at the start of the next
        whole = total_batches(trainer) if training else math.inf if total is None else total
        time_text = clock_text(clock.elapsed) if finished else f"eta {clock_text(clock.left(whole))}"
        task.completed = done
        task.fields.update(speed=rate_text(clock.rate), time=time_text)
        if self.progress.live.is_started:
            self.progress.refresh()
        elif finished or time.monotonic() >= self._plain_at:
            self._plain_at = time.monotonic() + PLAIN_INTERVAL
            self.progress.console.print(self._line(number), soft_wrap=True, highlight=False, markup=False)

    def _current(self, trainer: Trainer) -> TaskID | None:
        return {
            "train": self.train_progress_bar_id,
            "sanity_check": self.val_sanity_progress_bar_id,
            "validate": self.val_progress_bar_id,
            "test": self.test_progress_bar_id,
            "predict": self.predict_progress_bar_id,
        }.get(trainer.stage)

    def _line(self, number: TaskID) -> str:
        assert self.progress is not None
        task, column = self._task(number), self.progress.columns[-1]
        count = count_text(int(task.completed), math.inf if task.total is None else task.total)
        metrics = column(task) if isinstance(column, MetricsTextColumn) else ""
        parts = (task.description, count, task.fields.get("speed"), task.fields.get("time"), metrics)
        return "  ".join(str(part) for part in parts if part)


def _known(total: float) -> float | None:
    """Return Rich's total: None for an infinite one."""
    return total if math.isfinite(total) else None


def total_batches(trainer: Trainer) -> float:
    """Count the batches of the whole fit; infinity if neither limit nor length is known."""
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
