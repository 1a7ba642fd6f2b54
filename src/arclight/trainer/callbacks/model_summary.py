"""A table of what the model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from torch import nn

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class LayerSummary:
    """One line of the table."""

    name: str
    type: str
    parameters: int
    mode: str


class ModelSummary(Callback):
    """Print the model's children with their parameter counts when fit begins.

    ``max_depth``: how deep to look (1: direct children, -1: every layer, 0: nothing is printed).
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ValueError(f"ModelSummary(max_depth={max_depth}): -1 shows every layer, 0 none, n the first n levels")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.is_global_zero and self.max_depth:
            from rich.console import Console

            Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(
                summary_text(pl_module, self.max_depth),
            )


def summarize(module: nn.Module, max_depth: int = 1) -> list[LayerSummary]:
    """Submodules down to ``max_depth`` levels (-1: all), in order of definition."""
    return [
        LayerSummary(
            name,
            type(part).__name__,
            sum(p.numel() for p in part.parameters()),
            "train" if part.training else "eval",
        )
        for name, part in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]


def summary_text(module: nn.Module, max_depth: int = 1) -> str:
    """The table as text, with totals and the size of the parameters in memory."""
    rows = [("", "name", "type", "parameters", "mode")]
    rows += [
        (str(n), r.name, r.type, short_count(r.parameters), r.mode) for n, r in enumerate(summarize(module, max_depth))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in (0, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    parameters = list(module.parameters())
    total, trainable = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in parameters) / 1e6
    lines.insert(1, "-" * max(map(len, lines)))
    frozen = f", {short_count(total - trainable)} frozen" if trainable < total else ""
    return "\n".join([*lines, "", f"{type(module).__name__}: {total:,} parameters{frozen}, {size:,.1f} MB"])


def short_count(count: int) -> str:
    """``count`` to three figures: 812, 7.22 M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return str(count)
