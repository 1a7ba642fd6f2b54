"""Run a user's own module: ``arclight train|validate|test|predict package.module:Model``.

`train`, `evaluate` and `predict` call `run_user_module` if the first word names a class; `export` calls `build`, and `tune` its parts. Flags
come from the constructors of module and data module. The run folder has a config.toml, which ``--config`` and `export` read: its name and
its [model] kind stay.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli import user_module
from arclight.cli.arguments import Parser, UsageError, check_short_flags, write_json
from arclight.cli.run_record import RunRecord
from arclight.cli.run_setup import (
    callbacks,
    check_plan,
    evaluating_callbacks,
    make_trainer,
    report_paths,
    resume_from,
)
from arclight.cli.runs import best_checkpoint, newest_checkpoint
from arclight.cli.schema import UserRun

if TYPE_CHECKING:
    from arclight.trainer import DataModule, Module, RunFolder

ABOUT = {
    "train": "Train a module of your own, into a new run folder.",
    "validate": "Evaluate a module of your own on its validation data.",
    "test": "Evaluate a module of your own on its test data.",
    "predict": "Predict with a module of your own on its data.",
}


def run_user_module(verb: str, model: type, words: Sequence[str]) -> None:
    """Run ``verb`` with ``model``, a subclass of Module, as the words after it describe."""
    parser = user_parser(verb)
    words_without_help = [word for word in words if word not in ("-h", "--help")]
    options, flags = parser.parse_known_args(words_without_help)
    if len(words_without_help) < len(words):
        print(user_help(parser, model, options))
        return
    check_short_flags(flags, UserRun)
    run = user_module.read_run(model, options, flags)
    text = user_module.config_text(run)
    if options.print_config:
        print(text, end="")
    elif verb == "train":
        train(run, text, options)
    elif verb == "predict":
        predict(run, options)
    else:
        evaluate(verb, run, options)


def user_parser(verb: str) -> Parser:
    usage = f"arclight {verb} package.module:Model [options] [--model.argument value ...] [--data.argument value ...]"
    parser = Parser(prog=f"arclight {verb}", usage=usage, description=ABOUT[verb], add_help=False)
    parser.add_argument("--data", metavar="TARGET", help="package.module:Class of the data; default: the module's own")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="settings in TOML; later files override earlier ones, flags override files",
    )  # fmt: skip
    parser.add_argument(
        "--print_config", action="store_true", help="print all settings in the format of --config, and exit"
    )
    if verb == "train":
        parser.add_argument(
            "--ckpt_path", metavar="last|PATH",
            help="checkpoint to resume from: last for the newest one of the newest run of this name, or the PATH of a checkpoint or a run folder",
        )  # fmt: skip
    else:
        user_module.add_weights(parser)
    if verb in ("validate", "test"):
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    if verb == "predict":
        parser.add_argument(
            "--out", type=Path, metavar="FILE", help="save the predictions to this file with torch.save"
        )
    return parser


def train(run: UserRun, text: str, options: Namespace) -> None:
    from arclight.cli.interruption import Interruption
    from arclight.trainer.callbacks import RunReport

    among = run.runs if run.checkpoint.folder is None else None
    folder, checkpoint = resume_from(options.ckpt_path, "--ckpt_path", among)
    module, data = build(run)
    if run.plan is not None:
        check_plan(run.plan, module)
    record, interruption = ConfigRecord(text, run.model.target), Interruption()
    trainer = make_trainer(run, callbacks=[*callbacks(run), record, RunReport(), interruption], run_folder=folder)
    again = f"arclight train {run.model.target} --config {{run}}/config.toml --ckpt_path {{run}}"
    with interruption.explained(trainer.paths, again):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        report_paths(None if trainer.fast_dev_run else trainer.run_folder, trainer.checkpoint_callbacks)


def evaluate(stage: str, run: UserRun, options: Namespace) -> None:
    checkpoint = weights_of(options.ckpt_path, run)
    module, data = build(run)
    parts = evaluating_callbacks(run, checkpoint)
    trainer = make_trainer(run, callbacks=parts, logger=False, enable_checkpointing=False)
    results = getattr(trainer, stage)(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        write_json(options.json, results)


def predict(run: UserRun, options: Namespace) -> None:
    import torch

    checkpoint = weights_of(options.ckpt_path, run)
    module, data = build(run)
    parts = evaluating_callbacks(run, checkpoint)
    trainer = make_trainer(run, callbacks=parts, logger=False, enable_checkpointing=False)
    if options.out is not None and trainer.world_size > 1:
        raise UsageError("--out keeps the predictions of one process: add --trainer.devices 1")
    outputs = trainer.predict(module, datamodule=data, ckpt_path=checkpoint, return_predictions=options.out is not None)
    if options.out is not None:
        torch.save(outputs, options.out)
        print(f"The predictions are in {options.out}")


def weights_of(place: str | None, run: UserRun) -> str | Path | None:
    """Return the checkpoint that ``--ckpt_path`` names where nothing is resumed; None for None.

    ``last`` is the newest checkpoint of the newest run of this name, as in training; of a run folder it is the best one. Raises
    UsageError if there is no checkpoint.
    """
    from arclight.checkpoint import find_last
    from arclight.trainer import RunFolder

    if place == "last" and (folder := run.checkpoint.folder) is not None:
        if (kept := find_last(folder)) is None:
            raise UsageError(f"--ckpt_path last: there is no checkpoint in {folder}")
        return kept
    if place == "last":
        if (newest := RunFolder.newest(run.runs.parent, run.runs.name)) is None:
            raise UsageError(f"--ckpt_path last: there is no run in {run.runs}")
        return newest_checkpoint(newest.path)
    if place is not None and (Path(place) / "checkpoints").is_dir():
        return best_checkpoint(Path(place))
    return resume_from(place, "--ckpt_path")[1]


def build(run: UserRun) -> tuple[Module, DataModule | None]:
    """Build the module and its data, on seeded generators.

    Raises UsageError if a constructor refuses a value.
    """
    from arclight import seed_everything

    seed_everything(run.seed, workers=True)
    made: dict[str, Any] = {}
    for name, part in (("model", run.model), ("data", run.data)):
        try:
            made[name] = part.build() if part is not None else None
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    return made["model"], made["data"]


class ConfigRecord(RunRecord):
    """Write config.toml, which ``--config`` reads, in place of recipe.toml."""

    def __init__(self, text: str, target: str) -> None:
        super().__init__(text)
        self.target = target

    def keep(self, run: RunFolder, flags: str = "") -> None:
        path = run.path / "config.toml"
        self.write(path, f"arclight train {self.target} --config {path}{flags}")


def user_help(parser: Parser, model: type, options: Namespace) -> str:
    """Format the options, the constructors' arguments, and all other settings."""
    from arclight._intervals import describe
    from arclight.cli.help import field_help, listing
    from arclight.cli.style import bold, dim
    from arclight.recipe import Setting, explain

    width = min(shutil.get_terminal_size((120, 24)).columns, 130)
    table: dict[str, object] = {}
    for path in options.config:
        table = user_module.overlaid(table, user_module.load_config(path))
    lines = [parser.format_help().rstrip()]
    for name, cls in (("model", model), ("data", user_module.data_class(options, table))):
        if cls is None:
            continue
        about = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
        lines += [
            "",
            bold(f"[{name}] {user_module.target_of(cls)}"),
            *(dim(line) for line in textwrap.wrap(about, width)),
        ]
        docs, arguments = user_module.argument_docs(cls), user_module.parameters(cls)
        longest = max(map(len, arguments), default=0)
        for argument, (hint, default) in arguments.items():
            row = Setting(f"{name}.{argument}", "", describe(hint), default, docs[argument])
            lines += field_help(row, longest, width)
    others = [row for row in explain(UserRun) if row.path.partition(".")[0] not in ("model", "data")]
    return "\n".join([*lines, *listing(others, width)])
