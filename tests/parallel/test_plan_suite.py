"""The plan suite: on every plan, loss, gradients and loads of experts are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import warm
from tests.parallel.plan_suite import CASES

SCRIPT = Path(__file__).with_name("plan_suite.py")


def run(world_size: int, which: str) -> dict[str, dict[str, float]]:
    """The cases of one world size (quick, others or all) in one group of processes; what they found by the case's name."""
    first, *others = warm.run_ranks(world_size, SCRIPT, which, timeout=600)
    for done in (*others, first):
        assert done.returncode == 0, done.stderr[-4000:]
    return {found["case"]: found for line in first.stdout.splitlines() if (found := json.loads(line))}


def check(world_size: int, which: str) -> None:
    cases = [c for c in CASES if c.plan.world_size == world_size and c.quick == (which == "quick")]
    found = run(world_size, which)
    assert found.keys() == {case.name for case in cases}
    wrong = {
        case.name: found[case.name]
        for case in cases
        if not (
            found[case.name]["loss"] <= case.tolerance[0]
            and found[case.name]["gradient"] <= case.tolerance[1]
            and found[case.name]["loads"] <= 1e-6
        )
    }
    assert not wrong
    for case in cases:
        if case.plan.compile == "none":
            continue
        graphs, breaks = found[case.name]["graphs"], found[case.name]["breaks"]
        if case.plan.ep > 1:  # exchanges of rows read their numbers on the host, and nothing else leaves the graph
            assert breaks == 1, case.name
        else:  # one code for all blocks
            assert (graphs, breaks) == (1, 0), case.name


@pytest.mark.parametrize("world_size", [2, 4])
def test_quick_plans_equal_one_process(world_size: int) -> None:
    check(world_size, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", sorted({case.plan.world_size for case in CASES}))
def test_all_other_plans_equal_one_process(world_size: int) -> None:
    check(world_size, "others")
