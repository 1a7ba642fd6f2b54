"""Create and lay out the folder of one run, `<root>/<name>/<n>/`.

`RunPaths` makes it for a Trainer, ``cli`` for searches and federated runs, a logger without a Trainer its own. Names of files and folders
are public: users and older runs rely on them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arclight._installed import distribution
from arclight.fabric.atomic_replace import DISK_FULL, replace_text, sweep
from arclight.fabric.rank_zero import rank_zero_warn


class RunFolder:
    """Folder of one run; its number ``n`` counts up and is unique across processes.

    ``RunFolder(root, name)`` makes a new one, with ``number`` exactly that one (FileExistsError if
    it is taken); :meth:`open` goes on in one that exists.
    """

    def __init__(self, root: str | Path = "runs", name: str = "run", number: int | None = None) -> None:
        self._session: dict[str, Any] = {}
        parent = Path(root) / name
        self.path = next_folder(parent) if number is None else parent / str(number)
        if number is not None:
            self.path.mkdir(parents=True)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the run in ``path``, to continue it; FileNotFoundError if there is none."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a run folder; runs are folders like runs/<name>/<number>")
        run = cls.__new__(cls)
        run.path, run._session = folder, {}
        return run

    @classmethod
    def newest(
        cls, root: str | Path = "runs", name: str = "run", *, having: str | Sequence[str] = ""
    ) -> RunFolder | None:
        """Return the newest run of that name whose folder has a file ``having``; None without any.

        With several names in ``having`` one of them is enough.
        """
        parent = Path(root) / name
        files = [having] if isinstance(having, str) else having
        numbers = [n for n in run_numbers(parent) if any((parent / str(n) / file).exists() for file in files)]
        return cls.open(parent / str(max(numbers))) if numbers else None

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def number(self) -> int | None:
        return int(self.path.name) if self.path.name.isdigit() else None

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self._folder("checkpoints")

    @property
    def plots(self) -> Path:
        return self._folder("plots")

    def caption_plot(self, name: str, caption: str) -> None:
        """Write the report's caption for the plot ``name``."""
        path = self.plots / "captions.json"
        replace_text(path, json.dumps(read_json(path) | {name: caption}, indent=1), durable=False)

    def write_environment(self, **facts: Any) -> Path:
        """Write the run's environment with ``facts``; a resumed run keeps its first start time.

        A second call in one session adds its facts: only an environment that another session has written was resumed. The first one
        removes what killed processes were writing, here and in the run before.
        """
        if not self._session:
            for folder in (self.path, self.path.parent / str((self.number or 0) - 1)):
                sweep(folder)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            before = read_environment(self.environment) if self.environment.exists() else None
            self._session = (
                {"started": now} if before is None else {"started": before.get("started", now), "resumed": now}
            )
        self._session |= facts
        replace_text(self.environment, json.dumps({**self._session, **environment()}, indent=2) + "\n", durable=False)
        return self.environment

    def log_handler(self, level: int = logging.INFO) -> logging.Handler:
        """Return a logging handler that appends to log.txt.

        Use: ``logging.getLogger("arclight").addHandler(run.log_handler())``.
        """
        handler = LogFile(self.log)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        return handler

    def _folder(self, name: str) -> Path:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


class LogFile(logging.FileHandler):
    """Append to a log; lines for which a full disk has no room are dropped.

    What is logged then is often why the disk is full: a traceback for each line would hide it, and an error as the log is closed would take
    the place of that which ends the run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        error = sys.exc_info()[1]
        if not (isinstance(error, OSError) and error.errno in DISK_FULL):
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise


def run_numbers(parent: Path) -> list[int]:
    if not parent.is_dir():
        return []
    return [int(entry.name) for entry in parent.iterdir() if entry.name.isdigit() and entry.is_dir()]


def next_folder(parent: Path) -> Path:
    """Make the folder with the next free number: mkdir decides who gets it."""
    number = max(run_numbers(parent), default=0)
    while True:
        number += 1
        folder = parent / str(number)
        try:
            folder.mkdir(parents=True)  # the parent too, which a run that wrote nothing may be removing
        except FileExistsError:
            continue
        return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing or (with a warning) damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        rank_zero_warn(f"{path} is damaged, and is left out")
        return {}
    return found


def read_environment(path: Path) -> dict[str, Any]:
    """Read what a run ran on; facts of another type than `environment` gives are left out."""
    found = read_json(path)
    times = {name: found.pop(name) for name in ("started", "resumed") if name in found}
    kinds = {"cpu": str, "accelerators": list, "packages": dict}
    kept = {name: value for name, value in found.items() if isinstance(value, kinds.get(name, object))}
    return {name: value for name, value in times.items() if _is_time(value)} | kept


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def environment() -> dict[str, Any]:
    """Collect the versions and hardware that results depend on, but no secrets."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "arclight": package_version(distribution()),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "git_commit": git_commit(),
        "packages": dict(installed_packages()),
    }


def assignments(values: Mapping[str, Any]) -> str:
    """Return "name = value, ...", to show what "auto" settings were measured as."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())


@functools.cache
def installed_packages() -> tuple[tuple[str, str], ...]:
    """List names and versions of installed packages, sorted by name."""
    about = [package.metadata for package in importlib.metadata.distributions()]
    return tuple(sorted(((each["Name"], each["Version"]) for each in about), key=lambda package: package[0].lower()))


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from source)"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the working folder's git commit, with "+changes" if files differ; or None."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed.strip() else commit
