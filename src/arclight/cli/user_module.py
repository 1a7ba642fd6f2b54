"""Build a run's settings from a user's classes: constructor arguments become fields.

``arclight train package.module:Model --data package.module:Data --model.hidden 64 --config a.toml --config b.toml``: the
files are laid over each other in the order named, the flags over them.

`user_run`, `export`, `tune` and `plan.model` read runs by `read_run`; verbs that take a class recognise it by `named_module`. `config_text` is the
config.toml of a run, which later versions must read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any

from arclight import recipe
from arclight.cli.arguments import UsageError, problems_listed
from arclight.cli.schema import UserRun
from arclight.recipe import Imported, RecipeError, read, write

TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def named_module(arguments: Sequence[str]) -> type | None:
    """Import the Module class that the first word names as ``package.module:Name``; else None.

    Raises UsageError if the word has that form, is no file, and names nothing.
    """
    if not names_target(arguments):
        return None
    found = imported(arguments[0])
    if not isinstance(found, type):
        return None
    from arclight.trainer import Module

    return found if issubclass(found, Module) else None


def names_target(arguments: Sequence[str]) -> bool:
    """Return True if the first word has the form ``package.module:Name`` and is no file."""
    if not arguments or not TARGET.fullmatch(arguments[0]) or arguments[0].partition(":")[0].endswith(".py"):
        return False
    return not Path(arguments[0]).exists()


def imported(target: str) -> Any:
    """Import ``package.module:Name``; the current folder is searched last."""
    if not TARGET.fullmatch(target):
        raise UsageError(f"{target} names no class: write package.module:Name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return recipe.imported(target)
    except RecipeError as error:
        raise UsageError(str(error)) from error


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add ``--ckpt_path``, which `user_run.weights_of` resolves."""
    parser.add_argument(
        "--ckpt_path",
        metavar="last|PATH",
        help="weights of a module of your own: last for the newest checkpoint of the newest run of this name, or the PATH of a checkpoint, "
        "or of a run folder for its best one",
    )


def target_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def parameters(cls: type) -> dict[str, tuple[Any, Any]]:
    """Map each constructor argument to (type, default).

    Any if it is not annotated, MISSING for no default.
    """
    try:
        return recipe.arguments_of(cls)
    except NameError as error:
        raise UsageError(
            f"{target_of(cls)}: {error} where the constructor's arguments are annotated; import it outside TYPE_CHECKING"
        ) from error


def read_run(model: type, options: argparse.Namespace, flags: Sequence[str]) -> UserRun:
    """Read the run that ``options.config``, ``options.data`` and the flags describe.

    Raises UsageError with every problem.
    """
    table: dict[str, Any] = {}
    for path in options.config:
        table = overlaid(table, load_config(path))
    for name in ("model", "data"):
        if isinstance(table.get(name), str):
            table[name] = {"kind": table[name]}
    if wrong := [name for name in ("model", "data", "trainer") if not isinstance(table.get(name, {}), dict)]:
        raise UsageError(f"--config: {', '.join(wrong)} must be a table of settings")
    settings = table.setdefault("model", {})
    if "kind" in settings and imported(str(settings["kind"])) is not model:
        raise UsageError(f"--config is for model.kind = {settings['kind']}, not for {target_of(model)}")
    settings["kind"] = target_of(model)
    data = data_class(options, table)
    if data is None and ("data" in table or any(word.startswith("--data.") for word in flags)):
        raise UsageError("the data has settings but no class: name it with --data package.module:Class")
    with problems_listed(f"{target_of(model)} cannot be run"):
        run = read(UserRun, table, flags)
    if run.model.target != target_of(model):
        raise UsageError(f"--model.kind is {run.model.target}, but {target_of(model)} was named first")
    return run


def data_class(options: argparse.Namespace, table: dict[str, Any]) -> type | None:
    """Return the data's class, named by ``--data`` or else by a file; write it into ``table``.

    A class other than the file's takes none of the file's settings.
    """
    from arclight.trainer import DataModule

    settings = table.get("data")
    before = settings.get("kind") if isinstance(settings, dict) else None
    target = options.data if options.data is not None else before
    if target is None:
        return None
    found = imported(str(target))
    if not isinstance(found, type) or not issubclass(found, DataModule):
        raise UsageError(f"--data: {target} is not a subclass of arclight.DataModule")
    same = before is None or imported(str(before)) is found
    table["data"] = {**(settings if isinstance(settings, dict) and same else {}), "kind": target_of(found)}
    return found


def load_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``above`` into ``below``, table by table.

    A table whose ``kind`` differs replaces the one below.
    """
    both = dict(below)
    for name, value in above.items():
        under = below.get(name)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            same = "kind" not in value or "kind" not in under or value["kind"] == under["kind"]
            both[name] = overlaid(under, value) if same else dict(value)
        else:
            both[name] = value
    return both


def config_text(run: UserRun) -> str:
    """Return the run as TOML for ``--config``, with the constructors' defaults."""
    return write(
        dataclasses.replace(run, model=completed(run.model), data=run.data and completed(run.data)),
    )


def completed(made: Imported) -> Imported:
    """Add the defaults that ``made`` leaves out, if they read back as the same value."""
    cls, arguments = imported(made.target), {}
    given = {name: value.value if isinstance(value, Enum) else value for name, value in made.arguments.items()}
    for name, (_, default) in parameters(cls).items():
        if name in given:
            arguments[name] = given[name]
        elif default is not MISSING:
            plain = default.value if isinstance(default, Enum) else default
            with contextlib.suppress(RecipeError):
                table = tomllib.loads(write(Imported(target=made.target, arguments={**given, name: plain})))
                table.pop("kind")
                if read(cls, table).arguments[name] == default:
                    arguments[name] = plain
    return Imported(target=made.target, arguments=arguments)


def argument_docs(cls: type) -> dict[str, str]:
    """Return each argument's line in the docstrings of class and constructor; "" without one."""
    text = "\n".join(inspect.getdoc(part) or "" for part in (cls, cls.__init__))  # type: ignore[misc]
    docs = {}
    for name in parameters(cls):
        found = re.search(rf"^\s*(?::param\s+)?(?:\w+\s+)?`*{name}`*\s*(?:\([^)\n]*\))?:\s+(\S.*)$", text, re.MULTILINE)
        docs[name] = found.group(1).strip() if found else ""
    return docs
