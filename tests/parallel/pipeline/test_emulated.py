"""Simulated schedules match real processes whose stages sleep for a known time."""

from __future__ import annotations

import itertools

import pytest
from tests.parallel.pipeline.emulated import emulate_all
from tests.parallel.pipeline.naps import undisturbed

from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import Trace, bubble
from arclight.parallel.pipeline.schedule.table import SCHEDULES, order_of
from arclight.parallel.pipeline.unit_costs import UnitCost

RANKS, MICRO_BATCHES = 4, 8


def costs_of(name: str, unit: float, uneven: bool = False) -> list[UnitCost]:
    """Of stages that together take 3 units on each process; uneven: some stages more, some less."""
    own = SCHEDULES[name].stages_per_process
    turns = itertools.cycle([1.0, 1.4, 0.7, 0.9] if uneven else [1.0])
    return [UnitCost(*(unit * turn / own for _ in "FIW")) for _, turn in zip(range(own * RANKS), turns, strict=False)]


def compare(names: list[str], unit: float, uneven: bool = False, steps: int = 2) -> dict[str, tuple[float, float]]:
    """For each schedule measured over simulated seconds of a step, and points of bubble that were measured beyond theory.

    Of the fastest of several steps: others have the processors at times, which takes nothing off.
    """
    runs = [(name, costs_of(name, unit, uneven)) for name in names]
    found = {}
    for (name, costs), traces in zip(runs, emulate_all(runs, RANKS, MICRO_BATCHES, steps=steps), strict=True):
        for trace in traces:
            for rank, wanted in enumerate(order_of(name, RANKS, MICRO_BATCHES)):
                assert tuple(span.action for span in trace.of(rank)) == wanted
        fastest: Trace = min(traces, key=lambda trace: trace.seconds)
        expected = simulate(name, costs, RANKS, MICRO_BATCHES)
        found[name] = fastest.seconds / expected.seconds, 100 * (bubble(fastest) - bubble(expected))
    return found


@pytest.mark.slow
def test_a_step_takes_about_what_is_simulated() -> None:
    def check(longer: float) -> None:
        for name, (ratio, points) in compare(["1F1B", "V-Min"], 0.02 * longer).items():
            assert 0.99 < ratio < 1.4, name
            assert -5 < points < 15, name

    undisturbed(check)


@pytest.mark.slow
def test_steps_take_what_is_simulated() -> None:
    """With stages of unlike costs, which no schedule has been made for; naps grow for those alone that were disturbed."""
    left = set(SCHEDULES)

    def check(longer: float) -> None:
        for name, (ratio, points) in compare(sorted(left), 0.03 * longer, uneven=True).items():
            if 0.99 < ratio < (1.05 if SCHEDULES[name].stages_per_process == 1 else 1.1) and abs(points) < 5:
                left.remove(name)
        assert not left

    undisturbed(check)
