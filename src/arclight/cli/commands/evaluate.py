"""Evaluate a checkpoint on its recipe's data: ``arclight validate`` and ``arclight test``.

`command` calls `validate` and `test`. A recipe or a run comes in, and perhaps another checkpoint; metrics go out, for detectors with a page.
Questions for language models go to `language`, ``package.module:Model`` to `user_run`. Scripts read ``--json``, and
``vision.results.labelling`` the JSON beside the page: keys stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from arclight._intervals import kind_of
from arclight.cli.arguments import UsageError, check_writable, read_recipe, recipe_parser, write_json
from arclight.cli.run_setup import build_task, evaluating_callbacks, make_trainer
from arclight.cli.runs import best_checkpoint, checkpoint_note, checkpoint_of, run_folder, step_of
from arclight.cli.schema import Recipe
from arclight.cli.user_module import named_module

if TYPE_CHECKING:
    from arclight.trainer import Module
    from arclight.vision.tasks.detection import Detector

KINDS = {"validate": "Validation", "test": "Test"}
"""Line above the title of a page."""


def validate(arguments: list[str]) -> None:
    evaluate("validate", arguments)


def test(arguments: list[str]) -> None:
    evaluate("test", arguments)


def evaluate(stage: str, arguments: list[str]) -> None:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.user_run import run_user_module

        return run_user_module(stage, own, arguments[1:])
    if stage == "test" and any(word.partition("=")[0] in ("--questions", "--suite") for word in arguments):
        from arclight.cli.commands import language

        return language.answer(arguments)
    parser = recipe_parser(
        stage, f"Evaluate a checkpoint on the {'validation' if stage == 'validate' else stage} data."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a run folder for its best one (default: the best of the given run)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=f"of a detector: write a page of its curves, errors and worst images to this file (default: {stage}.html of the run)",
    )
    recipe, options = read_recipe(parser, arguments)
    if (checkpoint := options.checkpoint and checkpoint_of(options.checkpoint)) is None:
        run = run_folder(Path(options.source or ""))
        if run is None:
            raise UsageError("name a checkpoint with --checkpoint, or give a run folder instead of the recipe")
        checkpoint = best_checkpoint(run)
    module, data = build_task(recipe)
    page = report_place(stage, options, checkpoint, recipe, module)
    parts = evaluating_callbacks(recipe, checkpoint)
    trainer = make_trainer(recipe, callbacks=parts, logger=False, enable_checkpointing=False)
    if page is not None:
        cast("Detector", module).keep_records()
    results = getattr(trainer, stage)(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        print(checkpoint_note(checkpoint))
        write_json(options.json, results)
        if page is not None:
            write_page(page, cast("Detector", module), stage, checkpoint)
    return None


def report_place(
    stage: str, options: argparse.Namespace, checkpoint: Path, recipe: Recipe, module: Module
) -> Path | None:
    """Return the path of a detector's page, by default in the run; None for no page.

    Raises UsageError for ``--report`` without a detector, and if the JSON beside the page would have the path of ``--report`` or ``--json``.
    """
    chosen: Path | None = options.report
    kind, run = kind_of(type(recipe.task)), run_folder(checkpoint)
    if kind != "detection" or not _is_detector(module):
        if chosen is not None:
            raise UsageError(f"--report: a page is written for detectors, and this is a task of kind {kind}")
        return None
    if chosen is not None:
        check_writable(chosen, "--report")
    page = chosen if chosen is not None or run is None else run / f"{stage}.html"
    for place, flag in ((chosen, "--report"), (options.json, "--json")):
        if page is not None and place is not None and place.absolute() == page.with_suffix(".json").absolute():
            raise UsageError(f"{flag} {place}: the numbers of the page are written there; name another place")
    return page


def _is_detector(module: Module) -> bool:
    """Return False for what a user's own task of detection builds, if it is no `Detector`."""
    from arclight.vision.tasks.detection import Detector

    return isinstance(module, Detector)


def write_page(page: Path, module: Detector, stage: str, checkpoint: Path) -> None:
    """Write the page of a detector that was just evaluated, and its numbers as JSON."""
    from arclight.vision.results.validation_page import TIMED, write_validation

    records = module.results.records
    if not records:
        print("no page is written: no image could be read")
        return
    facts = {
        "model": module.settings.model, "image size": f"{module.settings.image_size} px", "data": str(module.settings.data),
        "checkpoint": checkpoint.name,
    }  # fmt: skip
    run = run_folder(checkpoint)
    title = checkpoint.name if run is None else f"{run.resolve().parent.name} {run.resolve().name}"
    times = module.stage_times([record.path for record in records[: TIMED + 1]])
    numbers = write_validation(
        page, module.results, module.names, title=title, kind=KINDS[stage], facts=facts, stage_ms=times
    )
    write_json(page.with_suffix(".json"), {"checkpoint": checkpoint.name, "step": step_of(checkpoint), **numbers})
    print(f"The report is {page}")
