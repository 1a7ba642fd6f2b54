"""Create consoles and progress bars: colours at a terminal, plain text in a pipe.

Verbs print most tables through `console_of` and show waiting by `progressed`, `counted` and `working`, on standard error; `help`, `command`,
`user_run` and `federate.progress` colour words. In a pipe nothing but plain text may appear on standard output. Looks may change freely.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
WIDTH = 140
"""Least columns of tables that are written to a file or pipe."""


def console_of() -> Console:
    """Make a console as wide as the terminal; at least ``WIDTH`` columns without one."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def progressed(items: Iterable[T], total: int, what: str, which: Callable[[T], object]) -> Iterator[T]:
    """Yield ``items`` with a progress bar on a terminal's standard error.

    ``which``: the part of the total that an item belongs to.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    here = sys.stdout.isatty()  # else the bar must not catch what goes to a file
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(), redirect_stdout=here
    ) as progress:
        bar, seen = progress.add_task("", total=total), set[object]()
        for item in items:
            yield item
            seen.add(which(item))
            progress.update(bar, completed=len(seen))


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a count on a terminal's standard error; yield a function of (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show the current work and its duration on a terminal's standard error."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(what), TimeElapsedColumn())
    here = sys.stdout.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(), redirect_stdout=here
    ) as progress:
        progress.add_task("", total=None)
        yield


def bold(text: str) -> str:
    return styled("1", text)


def dim(text: str) -> str:
    return styled("2", text)


def coloured(text: str) -> str:
    return styled("36", text)


def styled(code: str, text: str) -> str:
    """Return ``text`` in an ANSI style if standard output is a terminal that wants it."""
    wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if wanted and text else text


def printable(value: Any) -> str:
    """Return text on one line without control characters, which could command a terminal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.splitlines()))
