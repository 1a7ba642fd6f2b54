"""Emphasis where a person reads it, plain text where a program does."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 140
"""Columns of tables that are written to a file or pipe, which has no edge to break lines at."""


def console_of() -> Console:
    """Make a console as wide as the terminal; at least ``WIDTH`` columns where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def bold(text: str) -> str:
    return styled("1", text)


def dim(text: str) -> str:
    return styled("2", text)


def coloured(text: str) -> str:
    return styled("36", text)


def styled(code: str, text: str) -> str:
    """``text`` in an ANSI style if standard output is a terminal that wants it (https://no-color.org)."""
    wanted = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if wanted and text else text
