"""``metrics.csv``: a row for each round, which a person may watch grow."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from arclight.fabric import replacing
from arclight.federated.rounds.history_file import GrowingFile

Row = dict[str, Any]


class Table:
    """Rows are added; only a new column has the file written anew. ``before``: gives the rows that were added already."""

    def __init__(self, path: Path, before: Callable[[], Iterable[Row]]) -> None:
        self._file, self._before = GrowingFile(path), before
        self._columns: list[str] = []

    def write(self, settled: Sequence[Row], later: Sequence[Row]) -> None:
        """Add rows that stay from now on, and say anew those of which more may come."""
        if {name for row in (*settled, *later) for name in row} <= set(self._columns):
            self._file.write(self._text(settled), self._text(later))
            return
        columns = dict.fromkeys(name for rows in (self._before(), settled, later) for row in rows for name in row)
        self._columns = list(columns)
        temporary = replacing.temporary(self._file.path)
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self._columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self._before())
                writer.writerows(settled)
                stays = file.tell()
                writer.writerows(later)
            temporary.replace(self._file.path)
            self._file.stays = stays
        finally:
            replacing.discard(temporary)

    def forget(self) -> None:
        """Have all of it written anew the next time."""
        self._columns = []

    def _text(self, rows: Sequence[Row]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()
