"""Print the results of ``arclight plan RECIPE``: the chosen plan and its rivals, as tables.

`recipe_plan` calls `show` with the search result of ``arclight.parallel.planning``; `model` takes `table_of`, `short` and the constants for
tables of its own. Layout and colours are free: programs read ``--json``, which `recipe_plan` writes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from arclight.cli.style import console_of
from arclight.parallel.planning.explain import describe, duration, memory_name
from arclight.parallel.planning.memory import MemoryEstimate

if TYPE_CHECKING:
    from arclight.parallel.hardware import Hardware
    from arclight.parallel.planning.chain import Chain
    from arclight.parallel.planning.estimates import Estimate
    from arclight.parallel.planning.mesh_search import Limits, SearchResult

GIB = 2**30
COLOURS = {
    "parameters": "blue", "gradients": "cyan", "optimizer": "magenta", "activations": "green", "in_flight": "yellow", "logits": "red",
    "gathered": "bright_black",
}  # fmt: skip
BAR = 40
LEAST = 1e-3
"""Share of the whole below which a row is left out, if it would show zeros."""
REASONS = 12
"""Reasons against other plans that are printed; all are in the JSON."""


def show(chain: Chain, device: Hardware, limits: Limits, found: SearchResult) -> None:
    """Print the results of a search."""
    console, best = console_of(), found.best[0]
    console.print(Text.assemble(
        (f"{type(chain.model).__name__} of {short(chain.parameters_in_all)} parameters", "bold"),
        f" on {limits.gpus:,} x {device.name}: {short(best.tokens)} tokens a step, {limits.memory / GIB:.1f} GiB each",
    ))  # fmt: skip
    console.print(f"{found.considered:,} plans predicted; the fastest that fit\n", style="dim")
    console.print(_plans(found.best))
    console.print(_memory(best, limits))
    console.print(_traffic(best))
    console.print(_time(best))
    console.print(_rejected(found))


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table: the first column to the left, numbers to the right."""
    table = Table(
        title=title, title_style="bold", title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    return table


def _plans(best: list[Estimate]) -> Table:
    piped = any(one.plan.pp > 1 for one in best)
    columns = (
        "mesh",
        *(("schedule",) if piped else ()),
        "micro-batch",
        "recompute",
        "memory",
        "step",
        "tokens/s",
        "per GPU",
        "MFU",
        "idle",
    )
    table = table_of("Plans", *columns)
    for number, one in enumerate(best):
        schedule = (one.plan.schedule if one.plan.pp > 1 else "",) if piped else ()
        table.add_row(
            describe(one.plan), *schedule, f"{one.samples} x {one.passes}", str(one.plan.activation_checkpointing),
            f"{one.worst.total / GIB:.1f} GiB", duration(one.step_seconds), short(one.tokens_per_second),
            f"{one.tokens_per_second_per_gpu:,.0f}", f"{one.mfu:.1%}", f"{one.idle:.0%}", style="bold green" if number == 0 else "",
        )  # fmt: skip
    return table


def _memory(best: Estimate, limits: Limits) -> Table:
    """Tabulate memory by class at the first, the fullest and the last stage."""
    fullest = max(range(len(best.memory)), key=lambda stage: best.memory[stage].total)
    stages = sorted({0, fullest, len(best.memory) - 1})
    heads = [f"stage {stage + 1} of {len(best.memory)}" for stage in stages] if len(stages) > 1 else ["GiB"]
    table = table_of("\nMemory of a process, GiB", "", *heads, f"of {limits.memory / GIB:.1f}")
    table.columns[-1].justify = "left"
    for field in dataclasses.fields(MemoryEstimate):
        sizes = [getattr(best.memory[stage], field.name) for stage in stages]
        if max(sizes) < min(0.005 * GIB, LEAST * best.memory[fullest].total):  # 0.00, and a small share of all
            continue
        bar = "█" * round(BAR * getattr(best.memory[fullest], field.name) / limits.memory)
        table.add_row(memory_name(field.name), *(f"{size / GIB:.2f}" for size in sizes), Text(bar, COLOURS[field.name]))
    share = best.memory[fullest].total / limits.memory
    table.add_row(
        "in all", *(f"{best.memory[stage].total / GIB:.2f}" for stage in stages), f"{share:.0%}", style="bold"
    )
    if len(stages) > 1:
        table.add_row("blocks", *(str(best.layers[stage]) for stage in stages), "", style="dim")
    return table


def _traffic(best: Estimate) -> Table:
    table = table_of(
        "\nExchanges of a process in a step, GiB", "dimension", "processes", "collective", "bytes", "calls"
    )
    stage = max(best.traffic, key=lambda messages: sum(message.bytes for message in messages))
    for message in sorted(stage):
        members = (
            best.plan.dp_shard * best.plan.cp
            if message.dimension == "dp_shard"
            else getattr(best.plan, message.dimension)
        )
        table.add_row(
            message.dimension,
            f"{members:,}",
            message.collective.replace("_", "-"),
            f"{message.bytes / GIB:.3f}",
            f"{message.times:,.0f}",
        )
    if not stage:
        table.add_row("none", "", "", "", "")
    return table


def _time(best: Estimate) -> Table:
    table = table_of("\nWhere a step's time goes", "", "", "")
    for name, seconds in best.parts.items():
        share = seconds / best.step_seconds
        if share < LEAST and duration(seconds) == "0.0 ms":
            continue
        table.add_row(name, duration(seconds), Text("█" * round(BAR * share) or "", "green"))
    table.columns[2].justify = "left"
    return table


def _rejected(found: SearchResult) -> Table:
    table = table_of("\nWhy not otherwise", "choice", "reason")
    table.columns[1].justify = "left"
    for one in found.rejected[:REASONS]:
        table.add_row(one.change, one.reason)
    return table


def short(number: float) -> str:
    """Format a number with three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
