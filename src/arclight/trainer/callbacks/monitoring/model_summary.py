"""Print a table of the model's layers when training begins.

`Trainer` adds it if ``enable_model_summary`` is on (by default: if the progress bar is); ``trainer.summary`` counts. Name and arguments
are Lightning's; the look of the table may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from arclight.trainer import summary
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from rich.console import Console

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

Columns = list[tuple[str, list[str]]]


class ModelSummary(Callback):
    """Print the model's layers with their parameters when fit begins, as plain text on stderr.

    ``max_depth``: how deep to look (1: direct children, -1: every layer, 0: nothing is printed). ``options`` go to
    :meth:`summarize`, which a subclass may override to show the numbers elsewhere. See
    :class:`arclight.trainer.summary.ModelSummary` for what ``example_input_array`` adds.
    """

    def __init__(self, max_depth: int = 1, **options: Any) -> None:
        if max_depth < -1:
            raise ValueError(f"ModelSummary(max_depth={max_depth}): -1 shows every layer, 0 none, n the first n levels")
        self._max_depth, self._summarize_kwargs = max_depth, options

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._max_depth:
            return
        found = summary.ModelSummary(pl_module, self._max_depth)  # on every rank: a sharded model runs on all of them
        if trainer.is_global_zero:
            self.summarize(
                found._get_summary_data(),
                found.total_parameters,
                found.trainable_parameters,
                found.model_size,
                found.total_training_modes,
                total_flops=found.total_flops,
                **self._summarize_kwargs,
            )

    @staticmethod
    def summarize(
        summary_data: Columns,
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **options: Any,
    ) -> None:
        """Show the table. ``summary_data``: headings and cells of its columns; ``model_size`` in MB."""
        from rich.console import Console

        table = summary.format_table(
            summary_data, total_parameters, trainable_parameters, model_size, total_training_modes, total_flops
        )
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(table)


class RichModelSummary(ModelSummary):
    """Print the summary in a terminal's colours; ``header_style``: a rich style."""

    @staticmethod
    def summarize(
        summary_data: Columns,
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        header_style: str = "dim",
        **options: Any,
    ) -> None:
        """Show the table and a line of totals on rich's console."""
        from rich import get_console
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        if not total_flops:  # nothing was counted: there is no example input
            summary_data = [column for column in summary_data if column[0] != "FLOPs"]
        table = Table(box=SIMPLE_HEAD, header_style=header_style, pad_edge=False, show_edge=False)
        for heading, _ in summary_data:
            numeric = heading in ("Params", "Params per Device", "FLOPs")
            style = {" ": "dim", "Name": "bold"}.get(heading, "")
            table.add_column(heading, justify="right" if numeric else "left", style=style, no_wrap=heading == "Name")
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            table.add_row(*row)
        size = summary.get_formatted_model_size(model_size)
        facts = [f"{_count(total_parameters)} parameters, {size} MB"]
        if trainable_parameters < total_parameters:
            facts.append(
                f"{_count(trainable_parameters)} trainable, {_count(total_parameters - trainable_parameters)} frozen"
            )
        if total_training_modes["eval"]:
            facts.append(
                f"{total_training_modes['train']} modules in train mode, {total_training_modes['eval']} in eval mode"
            )
        if total_flops:
            facts.append(f"{_count(total_flops)} FLOPs for the example input")
        with _on_stderr(get_console()) as console:
            if summary_data[0][1]:
                console.print(table)
            console.print(Text("\n".join(facts) + "\n"), soft_wrap=True)


def _count(number: int) -> str:
    return summary.get_human_readable_count(int(number)).rstrip()


@contextmanager
def _on_stderr(console: Console) -> Iterator[Console]:
    """Redirect a console without a file of its own to stderr, so that stdout stays clean."""
    before, console.stderr = console.stderr, True
    try:
        yield console
    finally:
        console.stderr = before
