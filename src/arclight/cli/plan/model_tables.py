"""A pipeline of a model of one's own as tables: the plans, the stages of the best one, where its time goes, and why not otherwise."""

from __future__ import annotations

from math import log
from statistics import fmean
from typing import TYPE_CHECKING

from rich.text import Text

from arclight.cli.plan.recipe_tables import BAR, GIB, LEAST, REASONS, short, table_of
from arclight.cli.style import console_of
from arclight.parallel.pipeline.cost.choose import format_bytes
from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.step_trace import busy, idle
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.planning.explain import duration

if TYPE_CHECKING:
    from rich.table import Table

    from arclight.cli.plan.model import Subject
    from arclight.parallel.hardware import Hardware
    from arclight.parallel.pipeline.call_graph import CallGraph
    from arclight.parallel.pipeline.cost.candidates import EvaluatedPlan
    from arclight.parallel.pipeline.cost.choose import Choice, RejectedChoice
    from arclight.parallel.pipeline.unit_costs import ModelCosts

CAUSES = {
    "warm_up": ("waiting for the pipeline to fill", "yellow"), "schedule": ("waiting that the schedule asks for", "yellow"),
    "imbalance": ("waiting because stages differ", "red"), "communication": ("waiting for what is sent", "magenta"),
    "overhead": ("between actions", "bright_black"), "cool_down": ("waiting for the pipeline to drain", "yellow"),
}  # fmt: skip


def show(
    subject: Subject, graph: CallGraph, costs: ModelCosts, choice: Choice, device: Hardware, samples: int, limit: float
) -> None:  # fmt: skip
    """Print the answer of `planner.choose`."""
    console, best = console_of(), choice.best[0]
    processes = best.setting.processes * best.setting.replicas
    console.print(Text.assemble(
        (f"{subject.name} of {short(subject.parameters)} parameters", "bold"),
        f" on {processes:,} x {device.name}: {samples:,} samples a step, {limit / GIB:.1f} GiB each",
    ))  # fmt: skip
    console.print(
        f"{len(graph.calls)} parts, {costs.source}; {choice.considered:,} plans considered, the fastest that fit\n",
        style="dim",
    )
    console.print(_plans(choice, samples))
    console.print(_stages(best, graph))
    console.print(_processes(best, limit))
    console.print(_time(best))
    table = table_of("\nWhy not otherwise", "choice", "reason")
    table.columns[1].justify = "left"
    for one in _nearest(choice):
        table.add_row(one.choice, one.reason)
    console.print(table)


def _plans(choice: Choice, samples: int) -> Table:
    table = table_of("Plans", "mesh", "schedule", "micro-batch", "recompute", "memory", "step", "samples/s", "idle")
    for number, one in enumerate(choice.best):
        chosen = one.setting
        sizes = {"pp": chosen.processes, "dp_replicate": chosen.replicas}
        mesh = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
        table.add_row(
            mesh, chosen.schedule if chosen.processes > 1 else "", f"{one.samples} x {chosen.micro_batches}",
            "full" if chosen.recompute else "none", format_bytes(one.peak), duration(one.seconds), short(samples / one.seconds),
            f"{one.bubble:.0%}", style="bold green" if number == 0 else "",
        )  # fmt: skip
    return table


def _stages(best: EvaluatedPlan, graph: CallGraph) -> Table:
    """Tabulate each stage's parts and its time for one micro-batch."""
    table = table_of("\nStages of the first plan", "", "parts", "parameters", "forward", "backward", "")
    table.columns[1].justify = table.columns[5].justify = "left"
    slowest = max(part.seconds for part in best.parts)
    owner = {stage: rank for rank, own in enumerate(_own(best)) for stage in own}
    for stage, (begin, part) in enumerate(zip(best.cuts, best.parts, strict=True)):
        end = (*best.cuts[1:], len(graph.calls))[stage]
        names = [graph.calls[begin].name, graph.calls[end - 1].name]
        bar = "█" * round(BAR * part.seconds / slowest) if slowest else ""
        table.add_row(
            f"process {owner[stage]}", names[0] if end - begin == 1 else f"{names[0]} to {names[1]}", format_bytes(part.parameters),
            duration(part.forward), duration(part.backward), Text(bar, "green" if part.seconds < slowest else "yellow"),
        )  # fmt: skip
    return table


def _own(best: EvaluatedPlan) -> list[list[int]]:
    kind, size = schedule_kind(best.setting.schedule), best.setting.processes
    if size == 1:
        return [list(range(len(best.cuts)))]
    return [stages_of(rank, size, len(best.cuts), kind.v_shaped) for rank in range(size)]


def _processes(best: EvaluatedPlan, limit: float) -> Table:
    table = table_of("\nMemory of a process", "", "bytes", f"of {limit / GIB:.1f} GiB")
    table.columns[2].justify = "left"
    for rank, size in enumerate(best.memory):
        table.add_row(f"process {rank}", format_bytes(size), Text("█" * round(BAR * size / limit), "blue"))
    return table


def _time(best: EvaluatedPlan) -> Table:
    """Seconds of a step by cause, of a process on average."""
    table = table_of("\nWhere a step's time goes", "", "", "")
    table.columns[2].justify = "left"
    causes = idle(best.prediction)
    rows = [("computing", "green", fmean(busy(best.prediction)))]
    rows += [(words, colour, fmean(getattr(one, name) for one in causes)) for name, (words, colour) in CAUSES.items()]
    rows.append(("exchanging gradients", "cyan", best.seconds - best.prediction.seconds))
    for words, colour, seconds in rows:
        if seconds > LEAST * best.seconds:
            table.add_row(words, duration(seconds), Text("█" * round(BAR * seconds / best.seconds), colour))
    return table


def _nearest(choice: Choice) -> list[RejectedChoice]:
    """Keep rejected choices worth a line: of micro-batches only the nearest numbers."""
    number = choice.best[0].setting.micro_batches
    tried = [one for one in choice.rejected if one.choice.endswith(("micro-batch", "micro-batches"))]
    near = sorted(tried, key=lambda one: abs(log(int(one.choice.split()[0]) / number)))[:2]
    return [one for one in choice.rejected if one not in tried or one in near][: 2 * REASONS]
