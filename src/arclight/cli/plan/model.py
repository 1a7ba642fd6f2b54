"""Find the fastest pipeline of any model: ``arclight plan package.module:Model``.

`recipe_plan` calls `plan_model` if the first word names a class or function. One forward (a Module's training step) is captured, the costs of
its calls are predicted, or measured if asked for, and ``parallel.pipeline.cost.pipeline_search`` chooses the fastest plans that fit in memory.
Options and the keys of `as_json` are public and stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.text import Text

from arclight.cli import user_module
from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.plan.recipe_tables import BAR, GIB, LEAST, REASONS, short, table_of
from arclight.cli.style import console_of
from arclight.parallel.pipeline.cost.pipeline_search import format_bytes
from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.step_trace import busy, idle
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.plan import bytes_of
from arclight.parallel.planning.explain import duration

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from arclight.parallel.hardware import Hardware
    from arclight.parallel.pipeline.call_graph import CallGraph
    from arclight.parallel.pipeline.cost.candidates import EvaluatedPlan
    from arclight.parallel.pipeline.cost.pipeline_search import Choice, RejectedChoice
    from arclight.parallel.pipeline.unit_costs import ModelCosts


FIXED = ("pp", "schedule", "micro_batches", "activation_checkpointing")
"""Settings that --fix takes."""
OVERHEAD = {"cpu": 1e-4, "gpu": 3e-5}
"""Estimated seconds that an action of a schedule takes besides computing: for Python, and for messages that are sent and received."""


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model to plan, and its arguments."""

    name: str
    model: nn.Module
    function: str | None
    """The method that is a step; None: the forward."""
    example: Any
    """Arguments of the model for one micro-batch: ``(args, kwargs)``, a tuple, a dict, or a single argument."""
    parameters: int


def plan_model(arguments: Sequence[str]) -> int:
    """Run ``arclight plan package.module:Model``."""
    parser = _parser()
    if any(word in ("-h", "--help") for word in arguments):
        print(parser.format_help().rstrip())
        return 0
    options, flags = parser.parse_known_args(arguments[1:])
    from arclight.parallel.hardware import hardware

    device = hardware(options.gpu)
    if options.gpus < 1 or (options.samples is not None and options.samples < 1):
        raise UsageError("--gpus and --samples must be at least 1")
    subject = _subject(arguments[0], options, flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`self.log")  # a step that logs is called by hand here
        costs, graph = _costs(subject, device, options.measure)
    each = costs[-1].samples
    samples = options.samples if options.samples is not None else each * options.gpus
    choice = _choose(costs, samples, device, options)

    show(subject, graph, costs[-1], choice, device, samples, _limit(options, device))
    write_json(options.json, as_json(subject, costs[-1], choice))
    if options.timeline is not None:
        from arclight.parallel.pipeline.view.timeline import timeline

        best = choice.best[0]
        timeline(best.prediction, file=options.timeline, title=f"{subject.name}: {best.setting}, predicted")
        print(f"\n{options.timeline}: a step of the first plan")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="arclight plan", add_help=False,
        usage="arclight plan package.module:Model --gpus N [--example TARGET | --data TARGET] [options] [--model.argument value ...]",
        description="Split any model into pipeline stages, and find the fastest schedule, number of micro-batches and recomputation.",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of ranks, one device each (default 1)")
    parser.add_argument(
        "--example", metavar="TARGET",
        help="package.module:name of a micro-batch for the model's forward: a tuple, a dict, both, or a function that returns one",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="TARGET", help="package.module:Class of a DataModule, to plan the training step of a Module"
    )
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="settings in TOML")
    parser.add_argument("--memory", metavar="22GiB", help="memory limit of a rank (default: 95 %% of the device)")
    parser.add_argument(
        "--gpu", default="h100", help="h100, h200, a100, b200, mi300x, l40s, cpu, or a .toml file (default h100)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the modules on this machine's CPU instead of predicting their time",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="samples per step over all ranks (default: those of the example, for each rank)",
    )
    parser.add_argument(
        "--fix", action="append", default=[], metavar="pp=4", help=f"fix one of {', '.join(FIXED)}; may be repeated"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="plan for compiled blocks, whose backward no schedule can split"
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="plans to show (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw a step of the first plan (.html)")
    return parser


def _subject(target: str, options: argparse.Namespace, flags: Sequence[str]) -> PlannedModel:
    import torch
    from torch import nn

    from arclight.trainer import Module

    found = user_module.imported(target)
    if options.example is None and options.data is None and not options.config:
        raise UsageError("name the input of the model: --example package.module:name, or --data package.module:Class")
    build, data = _builders(found, target, options, flags)
    with torch.device("cpu" if options.measure else "meta"):
        try:
            model = build()
        except (RuntimeError, NotImplementedError) as error:
            raise UsageError(f"{target} cannot be built without memory ({error}): add --measure") from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{target} gives a {type(model).__name__}: name a class of modules, or a function that builds one"
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    if options.example is not None:
        example = user_module.imported(options.example)
        given = example() if callable(example) else example
        return PlannedModel(type(model).__name__, model, None, given, count)
    if not isinstance(model, Module):
        raise UsageError(f"--data is for a Module, and {target} is none: use --example package.module:name")
    batch = _first_batch(model, data() if data is not None else None)
    wanted = len(inspect.signature(model.training_step).parameters)
    return PlannedModel(type(model).__name__, model, "training_step", ((batch, 0)[:wanted], {}), count)


def _builders(
    found: Any, target: str, options: argparse.Namespace, flags: Sequence[str]
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """Return the functions that build the model and its data."""
    if not isinstance(found, type):
        if flags:
            raise UsageError(
                f"{flags[0]} is not an option, and {target} is a function that is called without arguments"
            )
        return found, None
    run = user_module.read_run(found, options, flags)
    return run.model.build, run.data.build if run.data is not None else None


def _first_batch(module: Any, data: Any) -> Any:
    """Load the first training batch."""
    source = data if data is not None else module
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    return next(iter(source.train_dataloader()))


def _costs(subject: PlannedModel, device: Hardware, measured: bool) -> tuple[tuple[ModelCosts, ...], CallGraph]:
    """Return costs of micro-batches of the example and of half of it, and the call graph.

    Costs for any size follow from these two.
    """
    from arclight.parallel.pipeline.call_graph import arguments_of, samples_of
    from arclight.parallel.pipeline.cost.measure import measure, predict
    from arclight.parallel.pipeline.splitting.capture import capture_call_graph

    args, kwargs = arguments_of(subject.example if isinstance(subject.example, (tuple, dict)) else (subject.example,))
    graph = capture_call_graph(subject.model, subject.function, args, kwargs)
    whole = samples_of((args, kwargs))
    found = []
    for samples in dict.fromkeys((max(1, whole // 2), whole)):
        given = _first_samples((args, kwargs), whole, samples)
        seen = graph if samples == whole else capture_call_graph(subject.model, subject.function, *given)
        if measured:
            found.append(measure(subject.model, seen, given, function=subject.function))
        else:
            found.append(predict(subject.model, seen, given, function=subject.function, device=device))
    return tuple(found), graph


def _first_samples(tree: Any, whole: int, samples: int) -> Any:
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda x: x[:samples] if x.ndim and x.shape[0] == whole else x, tree)


def _limit(options: argparse.Namespace, device: Hardware) -> float:
    return bytes_of(options.memory) if options.memory else 0.95 * device.memory * 2**30


def _choose(costs: tuple[ModelCosts, ...], samples: int, device: Hardware, options: argparse.Namespace) -> Choice:
    from arclight.parallel.pipeline.cost.pipeline_search import choose
    from arclight.parallel.pipeline.unit_costs import Link

    fixed = dict(_fixed(word) for word in options.fix)
    near = options.gpus <= device.node
    bandwidth, latency = (device.link, device.link_latency) if near else (device.network, device.network_latency)
    return choose(
        costs[0] if len(costs) == 1 else (costs[0], costs[1]), samples, options.gpus, stages=fixed.get("pp"),
        schedules=fixed.get("schedule", "auto"), micro_batches=fixed.get("micro_batches", "auto"),
        recompute=fixed.get("activation_checkpointing", "auto"), memory=_limit(options, device), compiled=options.compiled,
        link=Link(latency * 1e-6, bandwidth * 1e9), overhead=OVERHEAD[device.kind], keep=options.top,
    )  # fmt: skip


def _fixed(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if not equals or name not in FIXED:
        raise UsageError(
            f"--fix {word}: for a model of your own write one of {', '.join(FIXED)} and its value, as pp=4"
        )
    if name == "schedule":
        return name, text
    if name == "activation_checkpointing":
        if text not in ("none", "full"):
            raise UsageError(f"--fix {word}: for a model of your own choose none or full")
        return name, text == "full"
    if not text.isdecimal():
        raise UsageError(f"--fix {word}: write a number")
    return name, int(text)


def as_json(subject: PlannedModel, costs: ModelCosts, choice: Choice) -> dict[str, Any]:
    """Return the results as JSON, in bytes and seconds."""
    return {
        "model": subject.name,
        "parameters": subject.parameters,
        "costs": costs.as_json(),
        "considered": choice.considered,
        "plans": [
            {
                **dataclasses.asdict(one.setting), "cuts": one.cuts, "samples": one.samples, "seconds": one.seconds,
                "idle": one.bubble, "memory": one.memory,
            }
            for one in choice.best
        ],
        "rejected": [{"choice": one.choice, "reason": one.reason} for one in choice.rejected],
    }  # fmt: skip


CAUSES = {
    "warm_up": ("waiting for the pipeline to fill", "yellow"), "schedule": ("waiting that the schedule asks for", "yellow"),
    "imbalance": ("waiting because stages differ", "red"), "communication": ("waiting for what is sent", "magenta"),
    "overhead": ("between actions", "bright_black"), "cool_down": ("waiting for the pipeline to drain", "yellow"),
}  # fmt: skip


def show(
    subject: PlannedModel, graph: CallGraph, costs: ModelCosts, choice: Choice, device: Hardware, samples: int, limit: float
) -> None:  # fmt: skip
    """Print the best plans, the stages of the first one, and why others were rejected."""
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
    """Tabulate the seconds of a step by cause, averaged over processes."""
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
    """Return the rejected choices to show: of numbers of micro-batches only the two nearest."""
    number = choice.best[0].setting.micro_batches
    tried = [one for one in choice.rejected if one.choice.endswith(("micro-batch", "micro-batches"))]
    near = sorted(tried, key=lambda one: abs(log(int(one.choice.split()[0]) / number)))[:2]
    return [one for one in choice.rejected if one not in tried or one in near][: 2 * REASONS]
