"""Train by a recipe and write the run folder: ``arclight train``.

`command` calls `train`. A recipe or the run to resume comes in; a run folder goes out. ``package.module:Model`` goes to ``cli.user_run``. A task
that can check its data before a model is built has a method ``check_data`` (`ChecksData`).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from arclight._intervals import kind_of
from arclight.cli.arguments import RECIPE, UsageError, check_writable, read_recipe, recipe_parser
from arclight.cli.run_setup import build_task, callbacks, check_plan, make_trainer, report_paths, resume_from
from arclight.cli.runs import run_folder
from arclight.cli.user_module import named_module

if TYPE_CHECKING:
    from arclight.cli.schema import Recipe


def train(arguments: list[str]) -> None:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.user_run import run_user_module

        run_user_module("train", own, arguments[1:])
        return
    parser = recipe_parser("train", "Train from a recipe, into a new run folder.")
    parser.add_argument(
        "--resume",
        metavar="last|PATH",
        help="resume a run: last for the newest run of this name, or the PATH of a run folder or checkpoint",
    )
    recipe, options = read_recipe(parser, with_recipe_of_run(arguments))

    from arclight.cli.interruption import Interruption
    from arclight.cli.run_record import Preparation, RunRecord
    from arclight.trainer.callbacks import RunReport

    place = arguments[0] if options.resume == "last" and Path(arguments[0], "checkpoints").is_dir() else options.resume
    among = recipe.root / recipe.name if recipe.checkpoint.folder is None else None
    folder, checkpoint = resume_from(place, among=among)
    if folder is None and not recipe.trainer.fast_dev_run:
        check_writable(recipe.root / recipe.name, "root")
    check_task_of(recipe, checkpoint)
    check_data_of(recipe)
    module, data = build_task(recipe)
    if recipe.plan is not None:
        check_plan(recipe.plan, module)
    interruption = Interruption()
    parts = [*callbacks(recipe), RunRecord(recipe), RunReport(), interruption]
    trainer = make_trainer(recipe, callbacks=parts, run_folder=folder)
    with interruption.explained(trainer.paths, "arclight train --resume {run}"), Preparation():
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        report_paths(None if trainer.fast_dev_run else trainer.run_folder, trainer.checkpoint_callbacks)


def check_task_of(recipe: Recipe, checkpoint: str | Path | None) -> None:
    """Raise UsageError if the resumed run has learned another task than the recipe's."""
    run = run_folder(Path(checkpoint)) if checkpoint not in (None, "last") else None
    if run is None or not (run / RECIPE).is_file():
        return
    try:
        task = tomllib.loads((run / RECIPE).read_text(encoding="utf-8")).get("task")
    except ValueError:  # damaged, and written again by the run that begins now
        return
    before = str(task.get("kind", "")) if isinstance(task, dict) else str(task or "")
    here = kind_of(type(recipe.task))
    if before and ":" not in before and type(recipe.task).__module__.startswith("arclight.") and before != here:
        raise UsageError(
            f"--resume: {run} is a run of task.kind = {before}, and this recipe's is {here}: one cannot resume the other"
        )


@runtime_checkable
class ChecksData(Protocol):
    """A task that can look through its data before a model is built."""

    def check_data(self) -> None:
        """Log what is wrong with the data. Raises ValueError for data that cannot be trained on."""


def check_data_of(recipe: Recipe) -> None:
    """Check the task's data in the first process; UsageError if it cannot be trained on."""
    from arclight.fabric.rank_zero import rank_zero_only

    if isinstance(recipe.task, ChecksData) and rank_zero_only.rank == 0:
        try:
            recipe.task.check_data()
        except ValueError as error:
            raise UsageError(f"task: {error}") from error


def with_recipe_of_run(arguments: list[str]) -> list[str]:
    """Insert the recipe of the run that ``--resume`` names, if no recipe is named."""
    if not arguments or not arguments[0].startswith("-"):
        return arguments
    flags = [word.partition("=") for word in arguments]
    for (flag, equals, text), following in zip(flags, [*arguments[1:], ""]):
        run = run_folder(Path(text if equals else following)) if flag == "--resume" else None
        if run is not None and (run / RECIPE).is_file():
            return [str(run / RECIPE), *arguments]
    return arguments
