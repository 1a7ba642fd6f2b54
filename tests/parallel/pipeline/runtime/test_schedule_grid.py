"""Gradients of pipelines against micro-batches one after another: every schedule, and everything that goes wrong elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.optim.processes import run
from tests.parallel.pipeline.runtime.schedule_grid import CASES, gradient_error, gradient_errors

from arclight.parallel.pipeline.schedule.table import SCHEDULES

LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6}


def check(rank: int, runs: Sequence[tuple[torch.dtype, str, str]]) -> None:
    errors = {each: gradient_errors(each[0], each[1:2], each[2:])[each[1:]] for each in runs}
    assert len(errors) == len(runs)
    assert not (large := {each: error for each, error in errors.items() if not error <= LIMIT[each[0]]}), large


@pytest.mark.parametrize("case", CASES)
def test_one_process_that_has_all_stages_gives_what_the_model_gives(case: str) -> None:
    assert gradient_error("1F1B", case, torch.float64) <= LIMIT[torch.float64]


def test_interleaved_and_v_shaped_schedules_with_what_is_hardest(tmp_path: Path) -> None:
    """Interleaved and V-shaped, with whole and with split backward passes."""
    schedules = ("Interleaved1F1B", "ZBVZeroBubble")
    run(2, tmp_path, check, [(torch.float64, *each) for each in itertools.product(schedules, ("skip", "tied"))])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_case_on_two_processes(schedule: str, tmp_path: Path) -> None:
    run(2, tmp_path, check, [(torch.float64, schedule, case) for case in CASES])


HARDEST = ("skip", "tied")
"""What crosses more than one cut, and what two processes share."""
EASIER = [case for case in CASES if case not in HARDEST]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "schedule"), list(enumerate(SCHEDULES)), ids=list(SCHEDULES))
def test_the_hardest_cases_on_four_processes(number: int, schedule: str, tmp_path: Path) -> None:
    """The other cases take turns, in single precision: every schedule and every case meets both types and both numbers of processes."""
    other = (torch.float32, schedule, EASIER[number % len(EASIER)])
    run(4, tmp_path, check, [*((torch.float64, schedule, case) for case in HARDEST), other])
