"""Read the recipe of ``arclight quantize``: a kind or a file, with flags laid over it.

``commands.export`` calls `parse_quantization`. A flag ``--recipe.NAME`` sets a field of the kinds in ``deploy.settings``: names of kinds and
fields stay, and a new kind needs nothing here but its name in the help.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arclight.cli.arguments import Parser, UsageError, problems_listed
from arclight.deploy.settings import Int8, Quantization
from arclight.recipe import read


@dataclass(frozen=True, kw_only=True)
class _RecipeTable:
    """The recipe, as a file has it in a table and flags have it by name."""

    recipe: Quantization = field(default_factory=Int8)


def parse_quantization(
    parser: Parser, arguments: Sequence[str]
) -> tuple[Namespace, list[str], Quantization, list[str]]:  # fmt: skip
    """Parse ``arguments``; return options, remaining arguments, recipe and the recipe's flags.

    Raises UsageError with every problem of the recipe. ``parser`` gets the options of a recipe; its fields are flags of their own: ``--recipe.bits 4``.
    """
    parser.add_argument(
        "--recipe",
        metavar="KIND|FILE",
        help="int8 (default), dynamicint8, weightonly, bfloat16 or lowbit, or a .toml or .yaml file with a table [recipe]; its fields are "
        "flags, too: --recipe.bits 4 --recipe.group_size 64",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="MODULE", help="keep this module in float32; may be repeated"
    )
    words = list(arguments)
    fields: list[str] = []
    for place in reversed([at for at, word in enumerate(words) if word.startswith("--recipe.")]):
        length = 1 if "=" in words[place] else 2
        fields[:0] = words[place : place + length]
        del words[place : place + length]
    options, rest = parser.parse_known_args(words)
    given = {"skip": ",".join(options.skip) or None} | {
        name: getattr(options, name, None) for name in ("observer", "calibration_batches")
    }
    fields += [f"--recipe.{name}={value}" for name, value in given.items() if value is not None]
    source: str | dict[str, str] = {} if options.recipe is None else {"recipe": options.recipe}
    if Path(options.recipe or "").suffix in (".toml", ".yaml", ".yml"):
        if not Path(options.recipe).is_file():
            raise UsageError(f"--recipe {options.recipe}: there is no such file")
        source = str(options.recipe)
    with problems_listed(f"--recipe {options.recipe or 'int8'} cannot be used"):
        flags = [f"--recipe {options.recipe}"] * (options.recipe is not None) + fields
        return options, rest, read(_RecipeTable, source, fields).recipe, flags
