"""What every benchmark does with its figures: print a table, write it beside the script, write JSON where asked."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from arclight.trainer.run import cpu_name


def parser(about: str) -> argparse.ArgumentParser:
    """The interface that all benchmarks share."""
    arguments = argparse.ArgumentParser(description=about)
    arguments.add_argument(
        "--quick", action="store_true", help="a smaller run, to see that it works; its table is not written"
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures here, as one flat object of name to number"
    )
    return arguments


def versions(*packages: str) -> str:
    """Installed versions, and which packages are missing."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def publish(
    script: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], figures: Mapping[str, float], *, options: argparse.Namespace, packages: str,
    notes: str = "",
) -> None:  # fmt: skip
    """Print the table; write ``<script>.md`` (not for a quick run) and the JSON file."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    numbers = [f"* `{name}` = {value:.4g}" for name, value in figures.items()]
    text = "\n".join([*lines, "", *numbers])
    print(f"{title}\n\n{text}")
    if options.json is not None:
        options.json.write_text(json.dumps(dict(figures), indent=1) + "\n")
    if not options.quick:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        machine = f"{today}, {cpu_name()}, {platform.system()}, Python {platform.python_version()}, {packages}"
        page = f"# {title}\n\n{machine}. Written by `benchmarks/{script}.py`.\n\n{text}\n" + (
            f"\n{notes}\n" if notes else ""
        )
        Path(__file__).with_name(f"{script}.md").write_text(page)
