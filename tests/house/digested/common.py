"""Run commands in this process, and read what runs have written.

`text`, `vision` and `federated` use it. What a clock says must stay out of digests: see `TIMES`.
"""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path
from typing import Any

from arclight import checkpoint
from arclight.cli import main

TIMES = (
    "time",
    "second",
    "per_s",
    "wait",
    "busy",
    "memory",
    "wall",
    "mfu",
    "speed",
    "tokens_per",
    "samples_per",
    "flops",
)
"""Words in the names of columns of times, speeds and memory, which differ between runs."""


def typed(*words: str | Path) -> str:
    """Run one command in this process, and return what it printed; its status must be 0."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    assert status == 0, f"{words}: status {status}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue()


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv without the columns of `TIMES`."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not any(word in k for word in TIMES)} for row in csv.DictReader(file)]


def newest(run: Path) -> dict[str, Any]:
    """Return weights, averages, optimizers and schedules of a run's newest checkpoint."""
    path = checkpoint.find_last(run / "checkpoints")
    assert path is not None, f"{run} has no checkpoint"
    return entries(path)


def entries(path: Path) -> dict[str, Any]:
    state = checkpoint.load(path)
    return {name: state[name] for name in ("model", "ema", "optimizers", "schedulers") if name in state}
