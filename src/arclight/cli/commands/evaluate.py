"""``arclight validate`` and ``arclight test``: evaluate a checkpoint on the data of its recipe."""

from __future__ import annotations

from pathlib import Path

from arclight.cli.arguments import UsageError, read_recipe, recipe_parser, write_json
from arclight.cli.run_setup import build_task, make_trainer
from arclight.cli.runs import checkpoint_of, described, newest_checkpoint, run_folder
from arclight.cli.user_module import named_module


def validate(arguments: list[str]) -> None:
    evaluate("validate", arguments)


def test(arguments: list[str]) -> None:
    evaluate("test", arguments)


def evaluate(stage: str, arguments: list[str]) -> None:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.user_run import run_user_module

        return run_user_module(stage, own, arguments[1:])
    if stage == "test" and any(word.partition("=")[0] == "--questions" for word in arguments):
        from arclight.cli.commands import language

        return language.answer(arguments)
    parser = recipe_parser(
        stage, f"Evaluate a checkpoint on the {'validation' if stage == 'validate' else stage} data."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a run folder for its best one (default: the newest of the given run)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    recipe, options = read_recipe(parser, arguments)
    if (checkpoint := options.checkpoint and checkpoint_of(options.checkpoint)) is None:
        run = run_folder(Path(options.source or ""))
        if run is None:
            raise UsageError("name a checkpoint with --checkpoint, or give a run folder instead of the recipe")
        checkpoint = newest_checkpoint(run)
    module, data = build_task(recipe)
    trainer = make_trainer(recipe, logger=False, enable_checkpointing=False)
    results = getattr(trainer, stage)(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        print(described(checkpoint))
        write_json(options.json, results)
    return None
