"""Log metrics to a CSV file, with the same bytes after a kill and resume as without one.

The Trainer's default logger: ``metrics.csv`` in the run folder, which `read_metrics` reads for ``run.report`` and federated runs. Columns
may be added; those that are there keep their names, and a resumed run goes on in the same file.
"""

from __future__ import annotations

import csv
import io
import os
import re
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from arclight.fabric.atomic_replace import replace_text
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.folder_logger import FolderLogger
from arclight.trainer.loggers.logger import rank_zero_experiment
from arclight.trainer.loggers.params import convert_params, yaml_text

RETRY_S = 10.0
"""Seconds from an attempt on a full disk to the next."""
MAX_WAITING_ROWS = 10_000
"""Rows that wait for room on a full disk; of more the newest are kept."""
Row = dict[str, str]
_STEP = re.compile(r"-?\d{1,18}(\.\d+)?")


class CSVLogger(FolderLogger):
    """Log metrics to a CSV file: a row per :meth:`log_metrics`, a column per name.

    A cell without a value is empty.

    Without ``save_dir`` the file is ``metrics.csv`` in the run folder; with it,
    ``save_dir/name/version_<version>/metrics.csv``, the version counting up if none is given. A file that is already
    there is moved aside, with a warning. Numbers are written with ``repr``, so that they read back bit for bit. Rows
    reach the operating system every ``flush_logs_every_n_steps`` rows and at :meth:`save`.

    Rows are appended. A name seen for the first time adds a column: the file is then replaced whole, in one step, as for a resume or
    rollback, which deletes later rows. Columns are in the order of the alphabet, whatever was logged first.
    The newest logger of a process has the file: one that wrote it before raises MisconfigurationError for another row.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ValueError(f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps}): it must be at least 1")
        super().__init__(save_dir, name, version, prefix)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._experiment: ExperimentWriter | None = None
        self._begun = False

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """Writes the files; made when first used."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir, keep=self.needs_folder or self._begun)
            self._begun = True
        return self._experiment

    def use_folder(self, folder: Path) -> None:
        super().use_folder(folder)
        self._experiment = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.experiment.log_metrics(self._prefixed(metrics), step)
        if len(self.experiment.metrics) >= self._flush_logs_every_n_steps:
            self.save()
        if time.monotonic() < self._again_at:
            self.experiment.keep_newest(MAX_WAITING_ROWS)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        self.experiment.log_hparams(convert_params(params))

    @rank_zero_only
    def save(self) -> None:
        if self._experiment is not None and time.monotonic() >= self._again_at:
            with self._sparing_training(
                f"its rows wait in memory until there is room, the newest {MAX_WAITING_ROWS:,} of them"
            ):
                self._experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._again_at = 0.0
        self.save()
        if self._experiment is not None and (left := len(self._experiment.metrics)):
            rank_zero_warn(f"the disk is full: {left} rows are missing from {self._experiment.metrics_file_path}")
            self._experiment.report_dropped()

    def _on_full_disk(self) -> None:
        self._again_at = time.monotonic() + RETRY_S

    @rank_zero_only
    def resume(self, step: int) -> None:
        self.experiment.resume(step)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        with self._sparing_training("rows of the steps that are done again stay"):
            self.experiment.rewind(step)

    def __getstate__(self) -> dict[str, Any]:
        """Write pending rows, then return the state: another process continues the file."""
        self._again_at = 0.0
        self.save()
        return super().__getstate__()


_writers: weakref.WeakValueDictionary[str, ExperimentWriter] = weakref.WeakValueDictionary()
"""The newest writer of this process for each file; none for a file whose writer is gone."""


def check_apart(loggers: Sequence[Any]) -> None:
    """Raise MisconfigurationError for two loggers of one run that would write the same file."""
    places = [logger.log_dir for logger in loggers if isinstance(logger, CSVLogger)]
    if shared := {place for place in places if places.count(place) > 1}:
        raise MisconfigurationError(
            f"two CSVLoggers of one trainer would write {sorted(shared)[0]}/{ExperimentWriter.NAME_METRICS_FILE} and mix their rows: "
            "leave one out, or give them save_dir, name or version of their own"
        )


class ExperimentWriter:
    """Write ``metrics.csv`` and ``hparams.yaml`` in ``log_dir``, on any fsspec file system.

    With ``keep``, rows that are in the file already stay there. A process writes a file through its newest writer;
    rows of other processes are kept, under their columns.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str, keep: bool = False) -> None:
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        """Rows that are not in the file yet."""
        self.hparams: dict[Any, Any] = {}
        self._files, self._root = fsspec.core.url_to_fs(log_dir)
        self._local = isinstance(self._files, LocalFileSystem)
        self._columns: list[str] | None = None
        self._torn = False
        """True if the file ends within a row, which a crash has cut off."""
        self._next_step: int | None = None
        self._dropped: list[int] = []
        """The count, the first and the last step of rows that were dropped on a full disk."""
        self._aside: str | None = None
        self._replayed: list[Row] = []
        """Rows of the resumed step that are in the file and may be logged once more."""
        self._resumed_at = -1
        self._size_left = -1
        """Bytes in the file after this writer's newest change."""
        _writers[self.metrics_file_path] = self
        if not keep:
            self._check_log_dir_exists()

    @property
    def metrics_file_path(self) -> str:
        return os.path.join(self._root, self.NAME_METRICS_FILE)

    @property
    def metrics_keys(self) -> list[str]:
        """The file's columns."""
        if self._columns is None:
            text = self._read()
            self._columns, self._torn = parse_header(text), text != complete_rows(text)
        return self._columns

    def _check_log_dir_exists(self) -> None:
        """Move metrics of an earlier run with this version out of the way."""
        path = self.metrics_file_path
        if not self._files.exists(path):
            return
        number = 0
        while self._files.exists(aside := os.path.join(self._root, f"metrics-{number}.csv")):
            number += 1
        rank_zero_warn(
            f"Experiment logs directory {self.log_dir} exists and is not empty: its {self.NAME_METRICS_FILE} is now "
            f"{os.path.basename(aside)}; give the logger another version to keep runs apart"
        )
        self._files.mv(path, aside)
        self._aside = aside

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row; without ``step`` the one after the highest so far."""
        if step is None:
            step = self._highest_step() + 1 if self._next_step is None else self._next_step
            self._next_step = step + 1
        row = {**metrics, "step": step}
        if step == self._resumed_at and (text := as_text(row)) in self._replayed:
            self._replayed.remove(text)
            return
        self.metrics.append({name: value.item() if hasattr(value, "item") else value for name, value in row.items()})

    def keep_newest(self, most: int) -> None:
        """Drop the oldest of the rows that wait, if they are more than ``most``."""
        if dropped := [int(row["step"]) for row in self.metrics[:-most]]:
            count, first, _ = self._dropped or (0, dropped[0], 0)
            self._dropped = [count + len(dropped), first, dropped[-1]]
            del self.metrics[:-most]

    def log_hparams(self, params: Mapping[Any, Any]) -> None:
        """Add to ``hparams.yaml``."""
        self.hparams.update(params)
        self._replace(os.path.join(self._root, self.NAME_HPARAMS_FILE), yaml_text(self.hparams))

    def save(self) -> None:
        """Write the rows that wait."""
        if not self.metrics:
            return
        if _writers.setdefault(self.metrics_file_path, self) is not self:
            raise MisconfigurationError(
                f"another CSVLogger of this process writes {self.metrics_file_path} by now: log to that one, or give this one "
                "save_dir, name or version of its own"
            )
        self._look_for_others()
        rows = [as_text(row) for row in self.metrics]
        columns = sorted({*self.metrics_keys, *(name for row in rows for name in row)})
        if self._local and columns == self.metrics_keys and not self._torn:
            append_whole(self.metrics_file_path, csv_text(columns, rows))
        else:  # a new column, a row that was cut off, or a store where files do not grow
            old = parse_rows(self._read())
            self._replace(self.metrics_file_path, csv_text(columns, [*old, *rows], header=True))
        self._columns, self._torn = columns, False
        self.metrics = []
        self._size_left = self._size()
        self.report_dropped()

    def report_dropped(self) -> None:
        """Warn, once, of rows that were dropped."""
        if self._dropped:
            count, first, last = self._dropped
            rank_zero_warn(
                f"{count} rows of steps {first} to {last} are missing from {self.metrics_file_path}: the disk was full, and more had waited "
                "for room than are kept in memory"
            )
            self._dropped = []

    def _look_for_others(self) -> None:
        """Read the columns again, if another process has changed the file since this one did."""
        if self._size_left in (-1, self._size()):
            return
        rank_zero_warn(
            f"another process has written to {self.metrics_file_path} as well, and the rows of both are in it: give each run a "
            "name or version of its own"
        )
        self._columns = None

    def _size(self) -> int:
        path = self.metrics_file_path
        return int(self._files.size(path)) if self._local and self._files.exists(path) else -1

    def resume(self, step: int) -> None:
        """Delete rows later than ``step``, which a resumed run writes again.

        Rows at ``step`` stay; those among them that are logged again, because they were written after the
        checkpoint, are not doubled.
        """
        self.metrics, self._next_step, self._size_left = [], None, -1
        self._columns, self._replayed = None, []  # until the file has been replaced, which a full disk may not take
        if self._aside is not None:  # it was this run's own file
            self._files.mv(self._aside, self.metrics_file_path)
            self._aside = None
        rows = [row for row in parse_rows(self._read()) if step_of(row) <= step]
        if not self._files.exists(self.metrics_file_path):
            return
        columns = sorted({name for row in rows for name in row})
        self._replace(self.metrics_file_path, csv_text(columns, rows, header=True))
        self._columns, self._torn = columns, False
        self._replayed, self._resumed_at = [row for row in rows if row["step"] == str(step)], step

    def rewind(self, step: int) -> None:
        """Delete this writer's own rows later than ``step``; an earlier run's stay where they are."""
        self.metrics = [row for row in self.metrics if int(row["step"]) <= step]  # if others cannot be saved, they wait
        self.save()
        self._aside = None
        self.resume(step)

    def _highest_step(self) -> int:
        steps = [int(row["step"]) for row in self.metrics] or [step_of(row) for row in parse_rows(self._read())]
        return max(steps, default=-1)

    def _read(self) -> str:
        path = self.metrics_file_path
        return str(self._files.cat_file(path).decode(errors="replace")) if self._files.exists(path) else ""

    def _replace(self, path: str, text: str) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        if self._local:
            replace_text(Path(path), text, durable=False)
        else:
            self._files.pipe_file(path, text.encode())


def append_whole(path: str, text: str) -> None:
    """Append all of ``text`` to a file, or nothing.

    What a full disk has taken of it is truncated, and OSError raised.
    """
    before = os.path.getsize(path)
    try:
        with open(path, "a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError:
        os.truncate(path, before)
        raise


def as_text(row: Mapping[str, Any]) -> Row:
    return {name: number_text(value) for name, value in row.items()}


def number_text(value: Any) -> str:
    """Format a number, one-element tensor or text so that it reads back bit for bit."""
    if hasattr(value, "item"):
        value = value.item()
    # csv leaves a lone carriage return unquoted, and then cannot read it
    return repr(value) if isinstance(value, float) else str(value).replace("\r\n", "\n").replace("\r", "\n")


def csv_text(columns: list[str], rows: Iterable[Row], *, header: bool = False) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def parse_header(text: str) -> list[str]:
    return next(csv.reader(io.StringIO(complete_rows(text))), [])


def complete_rows(text: str) -> str:
    """Cut a CSV text after its last complete row, dropping one that a crash cut off."""
    end = text.rfind("\n") + 1
    while text.count('"', 0, end) % 2:  # a line's end within quotes is no row's end
        end = text.rfind("\n", 0, end - 1) + 1
    return text[:end]


def parse_rows(text: str) -> list[Row]:
    """Parse the rows of a CSV text, without empty cells and without a torn last row.

    Rows that a disk has damaged (with more or fewer cells than the header, or without a step) are left out; a warning counts them.
    """
    rows, damaged = list[Row](), 0
    reader = csv.DictReader(io.StringIO(complete_rows(text.replace("\0", ""))))
    while True:
        try:
            row = next(reader, None)
        except csv.Error:  # a cell that is too long; the reader goes on with the next line
            damaged += 1
            continue
        if row is None:
            break
        if None in row or None in row.values() or not _STEP.fullmatch(row.get("step", "")):
            damaged += 1
        else:
            rows.append({name: cell for name, cell in row.items() if cell})
    if damaged:
        rank_zero_warn(f"{damaged} damaged rows of {ExperimentWriter.NAME_METRICS_FILE} are left out")
    return rows


def step_of(row: Row) -> int:
    """Return the step of a row, which a user may have counted from below 0 or in parts."""
    return int(row["step"].partition(".")[0])


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the file at ``path``; none if it does not exist."""
    return parse_rows(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Read every metric in a ``metrics.csv`` as (step, value), sorted by step."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(path):
        step = step_of(row)
        del row["step"]
        for name, cell in row.items():
            try:
                curves.setdefault(name, []).append((step, float(cell)))
            except ValueError:
                continue  # a text is no curve
    return {name: sorted(points, key=lambda point: point[0]) for name, points in curves.items()}
