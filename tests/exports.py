"""Exports whose programs are compared in the process of the test: a fresh one costs each export a third of a second, with OpenVINO one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from arclight.deploy import Program
from arclight.deploy.formats import export as exporting
from arclight.deploy.programs.fresh import FreshRun


def in_this_process(program: Program, calls: Sequence[Sequence[np.ndarray[Any, Any]]]) -> FreshRun:
    """Run ``program``, in place of `run_fresh`."""
    given = []
    for call in calls:
        outputs = program(*call)
        given.append(list(outputs) if isinstance(outputs, tuple) else [outputs])
    return FreshRun(outputs=given, load_s=0.0, peak_bytes=0)


def compare_here(monkeypatch: pytest.MonkeyPatch, *, rounds: int | None = None) -> None:
    """Have exports compared here; for tests of what is written rather than of the process that reads it.

    rounds: calls by which a quantized program is timed, where not as many as in use.
    """
    monkeypatch.setattr(exporting, "run_fresh", in_this_process)
    if rounds is not None:
        monkeypatch.setattr(exporting, "TIMED_ROUNDS", rounds)
