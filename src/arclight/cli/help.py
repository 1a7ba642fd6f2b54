"""Print the ``--help`` of commands that take a recipe: options, then every recipe field.

`arguments` calls `recipe_help`, `user_run` calls `listing` and `field_help`. Types, defaults and docstrings of fields come in; text as wide as
the terminal, at most 130 columns, goes out. Wording and layout are free.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

from arclight._intervals import kind_of
from arclight.cli.style import bold, coloured, dim
from arclight.recipe import Setting, explain

INTRODUCTION = """
A recipe is a .toml or .yaml file, my_runs.py:function or package.module:function. Every field has a flag that overrides
the file, as in --trainer.max_epochs 3 or --task.optimizer.kind sgd. A list is written 1,2 and a missing value none.
A class of your own is kind = "package.module:Class". A Module of your own needs no recipe:
name it first, as package.module:Model --data package.module:Data; --help after it lists its arguments.
"""
ALL = "all"
"""Topic that shows everything."""
TYPE_WIDTH = 28
"""Space for the type and default of a field, in characters; longer ones push the explanation to the next line."""


def recipe_help(parser: ArgumentParser, schema: type, topic: str = "", own: Sequence[str] = ()) -> str:
    """Return ``parser``'s own options and the fields of ``schema``, as wide as the terminal.

    topic: the only table to show, with those in it; ``ALL`` for everything. own: the tables that are shown without a topic, while others are
    only named; empty for all. Raises LookupError, with the nearest table as its argument, if there is no table ``topic``.
    """
    width = min(shutil.get_terminal_size((120, 24)).columns, 130)
    settings = explain(schema)
    if topic and topic != ALL:
        paths = dict.fromkeys(_below(setting.path.rpartition(".")[0]) for setting in settings)
        paths.update({part: None for path in list(paths) for part in accumulate(path.split("."), "{}.{}".format)})
        if topic not in paths:
            raise LookupError(*get_close_matches(topic, paths, 1))
        return "\n".join(listing(settings, width, lambda table: f"{_below(table)}.".startswith(f"{topic}."))).strip()
    lines = [parser.format_help().rstrip(), "", *textwrap.wrap(INTRODUCTION.strip(), width)]
    if topic == ALL or not own:
        return "\n".join([*lines, *listing(settings, width)])
    return "\n".join([*lines, *listing(settings, width, lambda table: table in own), *others(settings, own, width)])


def others(settings: list[Setting], own: Sequence[str], width: int) -> list[str]:
    """List the other tables, a line each, and say how their fields are shown."""
    docs = {setting.path: setting.doc for setting in settings}
    tables = dict.fromkeys(setting.path.rpartition(".")[0] for setting in settings)
    names = [table for table in tables if table and table not in own and table.rpartition(".")[0] in ("", *own)]
    titles = [_title(table) for table in names]
    longest = max(map(len, titles), default=0)
    lines = [textwrap.shorten(docs[_below(table)], max(width - longest - 4, 30), placeholder=" ...") for table in names]
    hint = f"--help TABLE lists the fields of a table, as --help {_below(names[-1])}; --help all lists every field:"
    return [
        "", bold("Other tables"), *textwrap.wrap(hint, width),
        *(f"  {coloured(title)}{' ' * (longest - len(title))}  {line}" for title, line in zip(titles, lines, strict=True)),
    ]  # fmt: skip


def _title(table: str) -> str:
    """Return a table's name as its line in a recipe has it."""
    return f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"


def _below(table: str) -> str:
    """Return a table's name without the [] of tables of which there may be several."""
    return table.replace("[]", "")


def listing(settings: list[Setting], width: int, shows: Callable[[str], bool] = lambda table: True) -> list[str]:
    """List the settings table by table, each with its type, default and explanation."""
    holds = {id(row) for row, first in pairwise(settings) if first.path.startswith(f"{row.path}.") and not first.kind}
    tables: dict[tuple[str, str, str], list[Setting]] = {}
    fields: dict[tuple[str, str], Setting] = {}
    task = ""  # two kinds of a task may hold the same table, with other defaults
    for setting in settings:
        task = setting.kind if setting.path == "task.kind" else task if setting.path.startswith("task.") else ""
        fields[task, setting.path] = setting
        tables.setdefault((task, setting.path.rpartition(".")[0], setting.kind), []).append(setting)
    lines: list[str] = []
    for (task, table, kind), rows in tables.items():
        if not shows(table):
            continue
        names = [(of, name) for name in (table, _below(table)) for of in (task, "")]
        field = next((fields[name] for name in names if name in fields), None)
        lines += ["", *heading(table, kind, field, rows[0], width)]
        shown_rows = [row for row in rows if row.path != f"{table}.kind" and id(row) not in holds]
        longest = max((len(row.path.rpartition(".")[2]) for row in shown_rows), default=0)
        lines += [line for row in shown_rows for line in field_help(row, longest, width)]
    return lines


def heading(table: str, kind: str, field: Setting | None, first: Setting, width: int) -> list[str]:
    """Return the title of a table and its explanation.

    ``field`` is the table as a field of its parent, None at the top; ``first`` is its own first row.
    """
    if field is None:
        return [bold("Top-level fields")]
    title = _title(table) + (f' kind = "{kind}"' if kind else "")
    if kind and default_text(field.default) == kind:
        title += ", the default"
    doc = first.doc if kind else field.doc
    return [bold(title), *(dim(line) for line in textwrap.wrap(doc, width))]


def field_help(setting: Setting, longest: int, width: int) -> list[str]:
    """Return one field: name, type and default at the left, what it means at the right or below."""
    name, default = setting.path.rpartition(".")[2], default_text(setting.default)
    kind = setting.type + ("  (required)" if default is None else f"  [{default}]")
    column = longest + TYPE_WIDTH + 4
    docs = textwrap.wrap(setting.doc, max(width - column, 30)) or [""]
    lines = [" " * column + line for line in docs]
    left = f"  {coloured(name)}{' ' * (longest - len(name))}  "
    if len(kind) < TYPE_WIDTH:
        lines[0] = left + kind.ljust(TYPE_WIDTH) + docs[0]
    else:
        lines.insert(0, left + kind)
    return [line.rstrip() for line in lines]


def default_text(default: Any) -> str | None:
    """Return a default as it would be typed; None if there is none."""
    if default is MISSING:
        return None
    if dataclasses.is_dataclass(default):
        return kind_of(type(default))
    if isinstance(default, list | tuple):
        return ",".join(str(default_text(item)) for item in default) or "[]"
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)
