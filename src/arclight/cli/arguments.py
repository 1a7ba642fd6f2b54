"""Parse the arguments of ``arclight`` commands: a recipe with overrides, or options.

Every verb uses its `Parser` and raises `UsageError`, which ends the command with status 2 and its message. Options are public and stay. An
option of several verbs belongs here, one of a single verb in the module of that verb.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import arclight
from arclight.cli.schema import Recipe
from arclight.deploy.settings import FastestRuntime, Runtime
from arclight.recipe import RecipeError, explain, read

if TYPE_CHECKING:
    from arclight.deploy import Program

R = TypeVar("R", bound=Recipe)
RECIPE = "recipe.toml"
"""The name of a run's recipe in its folder."""


class UsageError(ValueError):
    """Error of a command line that cannot be carried out."""


class Parser(argparse.ArgumentParser):
    """Argument parser with errors of one line, like all others of the command."""

    own_tables: Sequence[str] = ()
    """Tables of a recipe that the help shows in full, while others are only named; empty: all are shown in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def check_spelling(self, words: Sequence[str], fields: Iterable[str] = ()) -> None:
        """Raise UsageError for an unknown flag among ``words`` that is nearly an option."""
        known = set(fields)
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and "." not in name and name[2:] not in known:
                for near in difflib.get_close_matches(name, self._option_string_actions, 1, cutoff=0.75):
                    raise UsageError(f"{name} is not an option of {self.prog}; did you mean {near}?")


def share(text: str) -> float:
    """Read a share, in [0, 1], as the ``type`` of an argument."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value


def count(text: str) -> int:
    """Read a whole number of 1 or more, as the ``type`` of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def seed(text: str) -> int:
    """Read a seed, a whole number of 0 or more, as the ``type`` of an argument."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


USUAL_NAMES = {
    "device": "accelerator", "gpus": "devices", "epochs": "max_epochs", "steps": "max_steps", "batch": "batch_size",
    "learning_rate": "lr", "img": "image_size", "imgsz": "image_size", "model_name": "model",
}  # fmt: skip
"""Names that other programs have for fields of a recipe, by the last part of a field's name."""


def check_short_flags(words: Sequence[str], schema: type) -> None:
    """Raise UsageError for a field's flag without its table, or by another program's name."""
    known = {field.name for field in dataclasses.fields(schema)}
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        if word in ("--logger", "--trainer.logger") or word.startswith(("--logger.", "--logger=", "--trainer.logger")):
            raise UsageError(
                f"--{name}: a recipe has no loggers to choose; its run writes metrics.csv and report.html. Others are given in "
                "Python: Trainer(logger=...)"
            )
        if not word.startswith("--") or name in known:
            continue
        table, dot, leaf = name.replace("-", "_").rpartition(".")
        if dot:
            if leaf in USUAL_NAMES:
                paths, meant = {setting.path for setting in explain(schema)}, f"{table}.{USUAL_NAMES[leaf]}"
                if name not in paths and meant in paths:
                    raise UsageError(f"--{name} is not a field of {schema.__name__}; did you mean --{meant}?")
            continue
        leaf = USUAL_NAMES.get(leaf, leaf)
        fields = dict.fromkeys(setting.path for setting in explain(schema) if setting.path.rpartition(".")[2] == leaf)
        near = sorted((path for path in fields if "[]" not in path), key=lambda path: path.count("."))[:2]
        if not near and not difflib.get_close_matches(leaf, known, 1):
            names = [setting.path for setting in explain(schema) if setting.path.startswith("trainer.")]
            near = [f"trainer.{name}" for name in difflib.get_close_matches(leaf, (n[8:] for n in names), 1)]
        if near:
            raise UsageError(f"--{name} is not a field of {schema.__name__}; did you mean --{' or --'.join(near)}?")


def check_no_data(source: str | None, verb: str) -> None:
    """Raise UsageError if the file named as a recipe describes a data set."""
    path = Path(source or "")
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if re.search(r"^names\s*:", text, re.MULTILINE) and re.search(r"^(train|val)\s*:", text, re.MULTILINE):
        raise UsageError(
            f"{source} describes a data set, not a run: give it to a recipe, as in {verb} detect-qris --task.data {source}"
        )


def recipe_parser(verb: str, about: str) -> Parser:
    """Return a parser for the options that a verb has beside its recipe."""
    usage = f"arclight {verb} [recipe.toml] [options] [--table.field value ...]"
    parser = Parser(prog=f"arclight {verb}", usage=usage, description=about, add_help=False)
    parser.own_tables = ("",)
    return parser


def read_recipe(parser: Parser, arguments: Sequence[str]) -> tuple[Recipe, argparse.Namespace]:
    """Read the recipe of a training run as `read_as` does.

    A federated recipe gives the part that a run without a federation has; ``arclight train`` refuses it.
    """
    arguments = [*map(recipe_file, arguments[:1]), *arguments[1:]]
    if arguments and is_federated(arguments[0]):
        from arclight.cli.federate.recipe import FederatedRecipe

        if parser.prog == "arclight train":
            raise UsageError(f"{arguments[0]} is a federated run: arclight federate {arguments[0]}")
        recipe, options = read_as(FederatedRecipe, parser, arguments)
        return recipe.plain(), options
    return read_as(Recipe, parser, arguments)


def is_federated(source: str) -> bool:
    """Return True for a recipe file with a table [federation]."""
    if Path(source).suffix != ".toml" or not Path(source).is_file():
        return False
    try:
        return "federation" in tomllib.loads(Path(source).read_text(encoding="utf-8-sig"))
    except ValueError:  # the caller that reads it reports what is wrong
        return False


def read_as(schema: type[R], parser: Parser, arguments: Sequence[str]) -> tuple[R, argparse.Namespace]:
    """Read the recipe named first, with flags laid over it, and the verb's own options.

    ``options.source`` is the file or name of the recipe (see `recipe_file`), or None. Prints the help and ends the program if that is asked
    for. Raises UsageError with every problem.
    """
    if asked := [place for place, word in enumerate(arguments) if word in ("-h", "--help")]:
        print(help_about(schema, parser, "".join(arguments[asked[0] + 1 : asked[0] + 2])))
        raise SystemExit(0)
    words = list(arguments)
    source = recipe_file(words.pop(0)) if words and not words[0].startswith("-") else None
    options, overrides = parser.parse_known_args(words)
    options.source = source
    if source is None and not overrides:
        raise UsageError(f"name a recipe, a .toml or .yaml file, or a run folder (see {parser.prog} --help)")
    check_file(source)
    check_no_data(source, parser.prog)
    check_short_flags(overrides, schema)
    parser.check_spelling(overrides, (field.name for field in dataclasses.fields(schema)))
    # Classes named as package.module:Class are looked for here too, as `python -m` does, after all that is installed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with problems_listed(f"{source or 'the recipe'} cannot be used"):
        return read(schema, source if source is not None else {}, overrides), options


def help_about(schema: type[Recipe], parser: Parser, topic: str) -> str:
    """Return the help of a verb and its schema, or of the schema's table ``topic`` alone.

    Raises UsageError if there is no such table.
    """
    from arclight.cli.help import recipe_help

    if topic.startswith("-") or ":" in topic or Path(topic).suffix in (".toml", ".yaml", ".yml"):
        topic = ""  # it belongs to the rest of the line
    try:
        return recipe_help(parser, schema, topic, parser.own_tables)
    except LookupError as error:
        near = "".join(f"; did you mean {name}?" for name in error.args)
        raise UsageError(f"--help {topic}: there is no such table in a recipe{near}") from error


def shipped_recipes() -> dict[str, Path]:
    """Find the recipes that come with Arclight, by bare name.

    They lie in the package, or beside the sources of a checkout.
    """
    package = Path(arclight.__file__).parent
    folders = [package / "recipes", package.parents[1] / "recipes"]
    found = next((folder for folder in folders if folder.is_dir()), None)
    return {path.stem: path for path in sorted(found.glob("*.toml"))} if found is not None else {}


def recipe_file(source: str) -> str:
    """Resolve ``source``: itself, the recipe of a run folder, or one that comes with Arclight.

    The last are found as lm-debug or recipes/lm-debug.toml, if there is no such file. Raises UsageError for the folder of a run of a user's
    own class, whose settings are no recipe.
    """
    path = Path(source)
    if (path / RECIPE).is_file():
        return str(path / RECIPE)
    if (path / "config.toml").is_file():
        first = (path / "config.toml").read_text(encoding="utf-8").partition("\n")[0]
        raise UsageError(
            f"{source} is the run of a class of your own, which has no recipe. Its first line: {first.lstrip('# ')}"
        )
    if source.startswith("-") or path.exists() or path.parent not in (Path(), Path("recipes")):
        return source
    name = path.stem if path.suffix == ".toml" else path.name
    return str(shipped_recipes().get(name, source))


def check_file(source: str | None) -> None:
    """Raise UsageError if ``source`` is no file but nearly the name of a recipe; suggest that."""
    path = Path(source or "")
    if source is None or path.exists() or ":" in source:
        return
    beside = (
        [other.name for other in path.parent.glob(f"*{path.suffix}") if looks_like_a_recipe(other)]
        if path.suffix
        else []
    )
    for near in difflib.get_close_matches(path.name, beside, 1):
        raise UsageError(f"there is no file {source}; did you mean {path.with_name(near)}?")
    for near in difflib.get_close_matches(path.name.removesuffix(".toml"), shipped_recipes(), 1):
        raise UsageError(f"there is no file {source}; did you mean {near}, which comes with Arclight?")
    if not path.suffix:
        raise UsageError(f"there is no run folder {source}, nor a recipe of this name")


def looks_like_a_recipe(path: Path) -> bool:
    """Return False for TOML files that are something else, such as pyproject.toml."""
    if path.suffix != ".toml":
        return True
    try:
        return bool({"task", "federation"} & tomllib.loads(path.read_text(encoding="utf-8-sig")).keys())
    except (OSError, ValueError):
        return False


@contextmanager
def problems_listed(heading: str) -> Iterator[None]:
    """Turn several problems of a recipe into one UsageError, a line each below the heading."""
    try:
        yield
    except RecipeError as error:
        if len(error.problems) == 1:
            raise
        lines = "".join(f"\n  {problem}" for problem in error.problems)
        raise UsageError(f"{heading}:{lines}") from error


def check_writable(place: Path, named: str) -> None:
    """Raise UsageError if ``place`` cannot be written, before the work that would be lost."""
    folder = next(parent for parent in (place.absolute().parent, *place.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "cannot be written to" if folder.is_dir() else "is not a folder"
        raise UsageError(f"{named} {place}: {folder} {what}; name another place")


def check_program_name(path: Path, is_folder: bool = False) -> None:
    """Check that a program can be written to ``path`` and has a name that fits.

    Raises UsageError, also for another file format than ONNX.

    is_folder: a folder is to be written, whatever its name; else a name without a suffix is that of a folder, and files end in .onnx.
    """
    if is_folder and path.suffix == ".onnx":
        raise UsageError(
            f"--out {path}: --format writes a folder; call it {path.with_suffix('')}, or leave --format out"
        )
    nameless = path.name in ("", "..")
    if nameless or (path.suffix not in ("", ".onnx") and not is_folder):
        name = path / "program.onnx" if nameless else path.with_suffix(".onnx")
        raise UsageError(
            f"--out {path}: a program is an ONNX file or a folder; call it {name} or {name.with_suffix('')}"
        )
    check_writable(path, "--out")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--trust`` of verbs that load programs; `trusted` reads it."""
    parser.add_argument(
        "--trust", action="append", metavar="KEY",
        help="load programs only if this public key, or one in this file, signed them; may be repeated (pt2 and aoti need it)",
    )  # fmt: skip


def trusted(options: argparse.Namespace) -> list[str] | None:
    """Return the public keys that ``--trust`` names; None if it is not given.

    Raises ProgramError for what is none.
    """
    if options.trust is None:
        return None
    from arclight.deploy.programs.folder import trusted_keys

    return sorted({key for named in options.trust for key in trusted_keys(named)})


RUNTIMES: tuple[str, ...] = (*get_args(Runtime), *get_args(FastestRuntime))
"""What ``--runtime`` takes: the runtimes, and "fastest" for the one that is measured to be."""


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--runtime`` of verbs that run a program; see `report_runtime`."""
    parser.add_argument(
        "--runtime", choices=RUNTIMES,
        help="what runs the program (default: what it was exported for); another one is compared with that at the load, and fastest times ONNX Runtime "
        "and OpenVINO",
    )  # fmt: skip


def runtimes(text: str) -> list[str]:
    """Read runtimes with commas between them as the ``type`` of an argument."""
    names = text.split(",")
    if unknown := [name for name in names if name not in RUNTIMES]:
        raise argparse.ArgumentTypeError(f"there is no runtime {unknown[0]!r}: take {', '.join(RUNTIMES)}")
    return names


def report_runtime(program: Program, asked: str | None) -> Program:
    """Print to standard error how the runtime was chosen, if one was asked for.

    Returns ``program``.
    """
    if asked is not None:
        sys.stderr.write(f"{program.path}: {program.choice.summary(program.runtime)}\n")
    return program


def write_json(place: Path | None, values: Any, escaped: bool = True) -> None:
    """Write ``values`` to the file of ``--json``, if there is one.

    escaped: write letters beyond ASCII as escapes.
    """
    if place is not None:
        text = json.dumps(values, indent=2, ensure_ascii=escaped) + "\n"
        place.write_text(text, encoding="utf-8", errors="backslashreplace")  # of names of files that are no text
