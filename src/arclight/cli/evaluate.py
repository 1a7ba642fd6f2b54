"""``arclight validate`` and ``arclight test``: a checkpoint measured on the data of its recipe."""

from __future__ import annotations

from pathlib import Path

from arclight.cli.arguments import UsageError, read_recipe, recipe_parser, write_json
from arclight.cli.own_module import named_module
from arclight.cli.train import build_task, make_trainer, run_of


def validate(arguments: list[str]) -> None:
    evaluate("validate", arguments)


def test(arguments: list[str]) -> None:
    evaluate("test", arguments)


def evaluate(stage: str, arguments: list[str]) -> None:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.own_run import own_run

        return own_run(stage, own, arguments[1:])
    if stage == "test" and any(word.partition("=")[0] == "--questions" for word in arguments):
        from arclight.cli import language

        return language.answer(arguments)
    parser = recipe_parser(stage, f"Measure a checkpoint on the {'validation' if stage == 'validate' else stage} data.")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="a checkpoint; default: the newest beside a run's recipe.toml"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the values here")
    recipe, options = read_recipe(parser, arguments)
    checkpoint = options.checkpoint or newest_checkpoint(run_of(options))
    module, data = build_task(recipe)
    trainer = make_trainer(recipe, logger=False, enable_checkpointing=False)
    results = getattr(trainer, stage)(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        write_json(options.json, results)
    return None


def newest_checkpoint(run: Path | None) -> Path:
    from arclight.checkpoint import find_last

    found = find_last(run / "checkpoints") if run is not None else None
    if found is None:
        raise UsageError("which checkpoint? name it with --checkpoint, or give the recipe.toml of a run that has one")
    return found
