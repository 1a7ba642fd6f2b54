"""Metrics as a CSV file, written so that a killed and resumed run leaves the same bytes as one never killed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from arclight.trainer.loggers.folder_logger import FolderLogger
from arclight.trainer.loggers.logger import plain_hyperparams, yaml_lines

Row = dict[str, str]


class CSVLogger(FolderLogger):
    """One row per call of :meth:`log_metrics`, one column per name, empty where a row has no value.

    Without ``save_dir`` the file is ``metrics.csv`` in the run folder; with it,
    ``save_dir/name/version_<version>/metrics.csv``, the version counting up where none is given.
    Numbers are written with ``repr``, so that they read back bit for bit. Rows reach the operating system
    every ``flush_logs_every_n_steps`` rows and at :meth:`save`.

    A row is only ever appended. A name seen for the first time adds a column: the file is then replaced
    whole, in one step.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "arclight_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps}): must be at least 1")
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._columns: list[str] | None = None
        self._waiting: list[Row] = []
        self._replayed: list[Row] = []
        """Rows of the resumed step that are in the file and may be logged once more."""
        self._resumed_at = -1

    def use_folder(self, folder: Path) -> None:
        super().use_folder(folder)
        self._columns = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        row = {
            "step": str(step if step is not None else self._next_step()),
            **{k: number_text(v) for k, v in self._prefixed(metrics).items()},
        }
        if row in self._replayed and row["step"] == str(self._resumed_at):
            self._replayed.remove(row)
            return
        self._waiting.append(row)
        if len(self._waiting) >= self._flush_every:
            self.save()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if flat := plain_hyperparams(params):
            replace_text(self._made_folder() / self.NAME_HPARAMS_FILE, yaml_lines(flat))

    def save(self) -> None:
        if not self._waiting:
            return
        self._made_folder()
        columns = self._known_columns()
        new = [name for name in dict.fromkeys(name for row in self._waiting for name in row) if name not in columns]
        if new:
            rows = read_rows(self.file)
            columns += new
            replace_text(self.file, csv_text(columns, [*rows, *self._waiting], header=True))
        else:
            with open(self.file, "a", encoding="utf-8", newline="") as file:
                file.write(csv_text(columns, self._waiting))
        self._waiting.clear()

    def resume(self, step: int) -> None:
        """Forget rows later than ``step``, so that the steps to come write them as if nothing had happened.

        Rows at ``step`` stay; those among them that are logged again, because they were written after the
        checkpoint, are not doubled.
        """
        self._waiting.clear()
        if not self.file.exists():
            return
        rows = [row for row in read_rows(self.file) if int(row["step"]) <= step]
        used = {name for row in rows for name in row}
        self._columns = [name for name in read_header(self.file) if name in used]
        replace_text(self.file, csv_text(self._columns, rows, header=True))
        self._replayed, self._resumed_at = [row for row in rows if row["step"] == str(step)], step

    def _next_step(self) -> int:
        steps = [int(row["step"]) for row in self._waiting] or [
            int(row["step"]) for row in (read_rows(self.file) if self.file.exists() else [])
        ]
        return max(steps, default=-1) + 1

    def _known_columns(self) -> list[str]:
        if self._columns is None:
            self._columns = read_header(self.file) if self.file.exists() else []
        return self._columns

    def _made_folder(self) -> Path:
        folder = Path(self.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def file(self) -> Path:
        return Path(self.log_dir) / self.NAME_METRICS_FILE


def number_text(value: Any) -> str:
    """``value`` (a number, a one-element tensor, or text) such that reading it back gives the same bits."""
    if hasattr(value, "item"):
        value = value.item()
    return repr(value) if isinstance(value, float) else str(value)


def csv_text(columns: list[str], rows: Iterable[Row], *, header: bool = False) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_header(path: Path) -> list[str]:
    with open(path, encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def read_rows(path: Path) -> list[Row]:
    """The rows of ``path`` without their empty cells; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(io.StringIO(complete))]


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric in a ``metrics.csv`` as (step, value) in order of step; ``epoch`` is a metric like any other."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(path):
        step = int(row.pop("step"))
        for name, cell in row.items():
            try:
                curves.setdefault(name, []).append((step, float(cell)))
            except ValueError:
                continue  # a text is no curve
    return {name: sorted(points, key=lambda point: point[0]) for name, points in curves.items()}


def replace_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
