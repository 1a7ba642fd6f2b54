"""The parts of a rich progress display, and how they are put together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

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
    """A text that the bar keeps with its task, at least ``width`` wide so that its neighbours stay where they are."""

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
    """Names and values of the metrics; drawn below the bars, where there is room for many."""

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
    """Rows of visible tasks, and the metrics of the first on lines of their own. The last column is the metrics' one."""

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
    """Description, bar, batches, speed, time. The least widths keep the bar in its place when another takes its turn."""
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
    """``done`` of ``total``, padded to the width of the total; ``done`` alone where the total is not known."""
    return f"{done:>{len(f'{int(total):,}')},}/{int(total):,}" if math.isfinite(total) else f"{done:,}"


def value_text(value: object, number_format: str) -> str:
    """A metric as text."""
    if isinstance(value, (str, int)) or not isinstance(value, float):
        return str(value)
    text = f"{value:{number_format}}"
    return f"{value:.3g}" if value and not text.strip("-+0.,") else text
