"""Predict how a recipe runs on many GPUs, and choose a plan: ``arclight plan``.

`command` calls `plan`. A language model's recipe and a number of GPUs come in; a table, JSON and a recipe with the chosen plan go out, and status 1
if ``--verify`` finds other sizes. ``parallel.planning`` predicts; `model` plans any other model. Options and the keys of the JSON are public and
stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight._intervals import renamed_value, todays_value
from arclight.cli.arguments import Parser, UsageError, read_recipe, recipe_parser, write_json
from arclight.cli.user_module import names_target
from arclight.parallel.plan import Plan, bytes_of
from arclight.text.settings import LanguageTask

if TYPE_CHECKING:
    from arclight.cli.schema import Recipe
    from arclight.parallel.hardware import Hardware
    from arclight.parallel.planning.chain import Chain
    from arclight.parallel.planning.estimates import Estimate
    from arclight.parallel.planning.mesh_search import Limits, SearchResult


def plan(arguments: list[str]) -> int:
    """Search for a plan, and print and write the results."""
    if names_target(arguments):
        from arclight.cli.plan.model import plan_model

        return plan_model(arguments)
    recipe, options = read_recipe(_parser(), arguments)
    task = recipe.task
    if not isinstance(task, LanguageTask):
        raise UsageError(
            "arclight plan reads recipes of language models; for any other model, write arclight plan package.module:Model --example "
            "package.module:name (see arclight plan package.module:Model --help)"
        )
    if options.write is not None:
        _require_free(options.write)  # before the search, which takes its time
    from arclight.parallel.hardware import hardware
    from arclight.parallel.planning.chain import Chain
    from arclight.parallel.planning.estimates import refined
    from arclight.parallel.planning.mesh_search import search

    device = hardware(options.gpu)
    gpus = options.gpus if options.gpus is not None else recipe.plan.world_size if recipe.plan is not None else 1
    try:
        chain = Chain(_workload(recipe, options, device, gpus))
    except ValueError as error:  # of a model's name or a field of its configuration
        raise UsageError(str(error)) from error
    limits = _limits(recipe, options, device, gpus)
    found = search(chain, limits, options.top)
    found = dataclasses.replace(
        found, best=sorted((refined(one, device) for one in found.best), key=lambda one: one.step_seconds)
    )
    from arclight.cli.plan.recipe_tables import show

    show(chain, device, limits, found)
    verified = not options.verify or _verified(task, found.best[0])
    if options.json is not None:
        write_json(options.json, as_json(chain, device, found))
    if options.write is not None:
        write(recipe, found.best[0], options)
    if options.timeline is not None:
        _timeline(found, device, options.timeline)
    return 0 if verified else 1


def _verified(task: LanguageTask, best: Estimate) -> bool:
    """Build the best plan's shares at their real size and print the result.

    Returns True if memory is as predicted.
    """
    from arclight.cli.plan.verification import line, verify
    from arclight.text.workload import fields

    shares = verify(best, task.model, fields(task, _vocabulary(task)))
    print("\n" + line(best, shares))
    return all(share.bytes == share.predicted for share in shares)


def _timeline(found: SearchResult, device: Hardware, file: Path) -> None:
    """Write a page with a step of the best plan that has a pipeline, as it is predicted."""
    from arclight.parallel.pipeline.view.timeline import timeline
    from arclight.parallel.planning.estimates import simulated
    from arclight.parallel.planning.explain import describe, duration

    place, best = next(((n, e) for n, e in enumerate(found.best, 1) if e.plan.pp > 1), (0, None))
    if best is None:
        raise UsageError(
            "--timeline shows pipelines, and no plan above has one: decide it (--fix pp=4), or show more plans (--top)"
        )
    step = simulated(best, device)
    after = f"; then {duration(best.step_seconds - step.seconds)} for gradients and the optimizer"
    timeline(
        step,
        file=file,
        title=f"{best.plan.schedule} on {best.plan.world_size} x {device.name}, predicted{after}",
    )
    print(f"\n{file}: the pipeline of plan {place}, {describe(best.plan)}")


def _parser() -> Parser:
    parser = recipe_parser(
        "plan",
        "Predict memory, traffic and step time of a recipe on GPUs that you need not have, and find the fastest plan. "
        "For any other model: arclight plan package.module:Model --help.",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="number of ranks, one GPU each (default: from the recipe's plan)"
    )
    parser.add_argument(
        "--memory", metavar="80GB", help="memory limit of a rank: GB, GiB, ... (default: 95 %% of the GPU)"
    )
    parser.add_argument(
        "--gpu",
        default="h100",
        help="h100, h200, a100, b200, mi300x, l40s, cpu, or a .toml file of your own (default h100)",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="samples per optimizer step over all ranks (default: from the recipe)"
    )
    parser.add_argument(
        "--fix", action="append", default=[], metavar="tp=8", help="fix a field of the plan; may be repeated"
    )
    parser.add_argument("--eager", action="store_true", help="plan for blocks that are not compiled")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="plans to show (default 5)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="build the first, a middle and the last rank of the best plan, and compare sizes of weights",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="draw a step of the best plan with a pipeline (.html)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recipe with the best plan to this file")
    return parser


def _workload(recipe: Recipe, options: argparse.Namespace, device: Hardware, gpus: int) -> Any:
    import torch

    from arclight.text.workload import workload

    assert isinstance(recipe.task, LanguageTask)
    data = recipe.task.data
    samples = options.samples
    if samples is None:
        samples = (data.global_batch_size or data.batch_size * gpus) * recipe.trainer.accumulate_grad_batches
    if gpus < 1 or samples < 1:
        raise UsageError("--gpus and --samples must be at least 1")
    precision = recipe.trainer.precision
    whole = precision == "32-true" or (precision == "auto" and device.kind == "cpu")
    if precision == "64-true":
        raise UsageError("trainer.precision = 64-true is not supported by the planner: choose 32-true or bf16-mixed")
    compiled = not options.eager and device.kind != "cpu"
    return workload(
        recipe.task, samples=samples, device=device, vocab_size=_vocabulary(recipe.task), compiled=compiled,
        compute=torch.float32 if whole else torch.bfloat16,
    )  # fmt: skip


def _vocabulary(task: LanguageTask) -> int | None:
    """Return the tokenizer's vocabulary size, unless the recipe gives the model's."""
    from arclight.text.data.data_module import TextDataModule

    return None if "vocab_size" in task.overrides else TextDataModule(task.data).vocab_size


def _limits(recipe: Recipe, options: argparse.Namespace, device: Hardware, gpus: int) -> Limits:
    from arclight.parallel.planning.mesh_search import Limits

    usual = Plan()
    names = [field.name for field in dataclasses.fields(Plan)] if recipe.plan is not None else []
    fixed: dict[str, Any] = {
        name: getattr(recipe.plan, name) for name in names if getattr(recipe.plan, name) != getattr(usual, name)
    }
    fixed |= dict(_fixed(word) for word in options.fix)
    if recipe.diloco is not None:
        if "dp_replicate" not in fixed:
            raise UsageError(
                "diloco leaves open how many independent replicas train: set plan.dp_replicate, or add --fix dp_replicate=2"
            )
        fixed["replicas"] = "independent"
    if not options.eager and device.kind != "cpu":
        fixed.setdefault("compile", "inductor")
    open_to_choice = (
        {"ep", "micro_batches"} if fixed.get("replicas") == "independent" else {"pp", "ep", "micro_batches"}
    )
    alone = fixed | dict.fromkeys(fixed.keys() & open_to_choice, 1)
    Plan(**alone)  # raise for contradictions at once
    return Limits(gpus, bytes_of(options.memory) if options.memory else 0.95 * device.memory * 2**30, fixed)


def _fixed(word: str) -> tuple[str, Any]:
    """Return a field of the plan and its value, from ``name=value``."""
    name, equals, text = word.partition("=")
    known = {field.name: getattr(Plan(), field.name) for field in dataclasses.fields(Plan)}
    if not equals or name not in known:
        raise UsageError(f"--fix {word}: write a field of the plan and its value, as tp=8; there is {', '.join(known)}")
    if isinstance(known[name], bool):
        return name, {"true": True, "false": False}.get(text.lower(), text)
    value = todays_value(Plan, name, text)
    if value != text:
        warnings.warn(renamed_value(f"--fix {name}", text, value), FutureWarning, stacklevel=2)
    return name, int(value) if value.isdigit() else value


def as_json(chain: Chain, device: Hardware, found: SearchResult) -> dict[str, Any]:
    """Return the results as JSON, in bytes and seconds."""
    return {
        "device": dataclasses.asdict(device),
        "parameters": chain.parameters_in_all,
        "flops_per_token": chain.flops_per_sample / chain.workload.sequence,
        "considered": found.considered,
        "plans": [_plan_as_json(one) for one in found.best],
        "rejected": [
            {"plan": dataclasses.asdict(one.plan), "change": one.change, "reason": one.reason} for one in found.rejected
        ],
    }


def _plan_as_json(one: Estimate) -> dict[str, Any]:
    return {
        "plan": dataclasses.asdict(one.plan), "samples": one.samples, "micro_batches": one.passes, "layers": one.layers,
        "seconds": one.step_seconds, "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu, "mfu": one.mfu, "idle": one.idle, "parts": one.parts,
        "memory": [{**dataclasses.asdict(stage), "total": stage.total} for stage in one.memory],
        "traffic": [[message._asdict() for message in stage] for stage in one.traffic],
    }  # fmt: skip


def _require_free(path: Path) -> None:
    """Raise UsageError if the file exists already."""
    if path.exists():
        raise UsageError(f"{path} already exists: name another file, or remove it")


def write(recipe: Recipe, best: Estimate, options: argparse.Namespace) -> None:
    """Write the recipe with ``best`` as its plan, and with batches of as many samples a step.

    Raises UsageError if the file exists.
    """
    from arclight.recipe import write as text_of
    from arclight.text.workload import with_batches

    assert isinstance(recipe.task, LanguageTask)
    path: Path = options.write
    _require_free(path)
    piped = best.plan.pp > 1
    task = with_batches(recipe.task, best.samples * (best.passes if piped else 1))
    trainer = dataclasses.replace(recipe.trainer, accumulate_grad_batches=1 if piped else best.passes, strategy="auto")
    made = dataclasses.replace(recipe, task=task, trainer=trainer, plan=best.plan)
    path.write_text(text_of(made), encoding="utf-8")
    print(f"wrote {path}: arclight train {path}")
