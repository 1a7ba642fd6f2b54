"""Gradients of pipelines against micro-batches one after another: every schedule, and everything that goes wrong elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.optim.processes import run
from tests.parallel.pipeline.runtime.schedule_grid import CASES, gradient_error, gradient_errors

from arclight.parallel.pipeline.schedule.table import SCHEDULES

LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6}


def check(rank: int, dtype: torch.dtype, schedules: Sequence[str], cases: Sequence[str]) -> None:
    errors = gradient_errors(dtype, schedules, cases)
    assert len(errors) == len(schedules) * len(cases)
    assert max(errors.values()) <= LIMIT[dtype], {case: error for case, error in errors.items() if error > LIMIT[dtype]}


@pytest.mark.parametrize("case", CASES)
def test_one_process_that_has_all_stages_gives_what_the_model_gives(case: str) -> None:
    assert gradient_error("1F1B", case, torch.float64) <= LIMIT[torch.float64]


def test_interleaved_and_v_shaped_schedules_with_what_is_hardest(tmp_path: Path) -> None:
    """Interleaved and V-shaped, with whole and with split backward passes."""
    run(2, tmp_path, check, torch.float64, ("Interleaved1F1B", "ZBVZeroBubble"), ("skip", "tied"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(LIMIT), ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("processes", [2, 4])
def test_the_whole_grid(processes: int, schedule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run(processes, tmp_path, check, dtype, (schedule,), CASES)
