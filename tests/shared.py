"""Fixtures of several files that are slow to make: made once in a run, by one of its workers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder ``name`` that ``make`` writes at the path it is given; tests read it and leave it as it is."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    folder = root / "shared"
    folder.mkdir(exist_ok=True)
    place = folder / name
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            draft = folder / "draft" / str(os.getpid()) / name
            draft.parent.mkdir(parents=True, exist_ok=True)
            make(draft)
            draft.rename(place)
    return place
