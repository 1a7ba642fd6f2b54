"""Schedules against their closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from arclight.optim import SGD, WSD, AdamW, Constant, Cosine, InverseSqrt, Linear, lambda_schedule
from arclight.optim.schedules import constant, cosine, inverse_sqrt, linear, phase, rewarmed, wsd

SHAPES = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
    "sqrt": lambda x: (1 - x) ** 0.5,
    "1-sqrt": lambda x: 1 - x**0.5,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_wsd_decays_in_each_shape(shape: str, final: float) -> None:
    values = [wsd(step, total_steps=100, warmup=10, decay=0.2, final=final, shape=shape) for step in range(101)]
    assert values[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert values[10:81] == [1.0] * 71
    assert values[80:] == pytest.approx([final + (1 - final) * SHAPES[shape](k / 20) for k in range(21)], abs=1e-12)
    assert values[99] > final


def test_linear_and_inverse_sqrt() -> None:
    values = [linear(step, total_steps=50, warmup=5, final=0.2) for step in range(50)]
    assert values[5:] == pytest.approx([0.2 + 0.8 * (1 - k / 45) for k in range(45)])
    falling = [inverse_sqrt(step, total_steps=400, warmup=99) for step in range(400)]
    assert falling[99] == 1.0
    assert falling[199] == pytest.approx(math.sqrt(1 / 2))
    assert inverse_sqrt(130, total_steps=400, warmup=100, timescale=10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "settings", [Cosine(final=0.0), Linear(), WSD(), WSD(shape="1-sqrt"), InverseSqrt(), Constant()]
)
def test_the_last_step_still_learns(settings: Any) -> None:
    optimizer = AdamW(lr=0.1).build([("w", nn.Parameter(torch.ones(2, 2)))])
    schedule, rates = settings.build(optimizer, 40), []
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert min(rates) > 0
    assert max(rates) == pytest.approx(0.1)


def test_a_phase_is_steps_or_a_share() -> None:
    assert phase(7, 100) == 7
    assert phase(0.07, 100) == 7
    assert phase(1, 100) == 1
    assert phase(1.0, 100) == 100
    with pytest.raises(ValueError, match=r"1\.5 is no share of the steps"):
        phase(1.5, 100)
    with pytest.raises(ValueError, match="a phase of 101 steps does not fit into a run of 100"):
        Cosine(warmup=101).build(AdamW().build([("w", nn.Parameter(torch.ones(2)))]), 100)


def test_a_second_warm_up() -> None:
    assert [rewarmed(step, since=5, steps=3) for step in range(4, 10)] == [1.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def stepped(settings: Any, total: int, steps: int, state: Any = None) -> tuple[list[float], Any]:
    """Rates of the steps that a schedule gives, and what a checkpoint has of it and its optimizer."""
    optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
    schedule, rates = settings.build(optimizer, total), []
    if state is not None:
        optimizer.load_state_dict(state[0])
        schedule.load_state_dict(state[1])
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates, (optimizer.state_dict(), schedule.state_dict())


def test_a_longer_run_goes_on_with_its_own_rate() -> None:
    settings = Linear(warmup=0)
    _, state = stepped(settings, 4, 4)
    rates, _ = stepped(settings, 8, 4, state)
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])
    same, _ = stepped(settings, 8, 8)
    first, state = stepped(settings, 8, 3)
    assert first + stepped(settings, 8, 5, state)[0] == same  # the same bits, where nothing has changed


def test_phases_that_do_not_fit_are_refused() -> None:
    optimizer = AdamW().build([("w", nn.Parameter(torch.ones(2)))])
    with pytest.raises(
        ValueError, match=r"warmup = 0.6 \(6 steps\) and decay = 0.6 \(6 steps\) do not fit into a run of 10"
    ):
        WSD(warmup=0.6, decay=0.6).build(optimizer, 10)
    WSD(warmup=0.5, decay=0.5).build(optimizer, 10)
    for wrong in (lambda: WSD(final=-1.0), lambda: InverseSqrt(timescale=-3), lambda: Cosine(rewarm=-1)):
        with pytest.raises(ValueError, match="need"):
            wrong()
    with pytest.raises(ValueError, match="rewarm: need int >= 0, got -1"):
        lambda_schedule(optimizer, lambda step: 1.0, rewarm=-1)


def test_cosine_warms_up_then_falls_by_half_a_cosine() -> None:
    values = [cosine(step, total_steps=50, warmup=5, final=0.2) for step in range(51)]
    assert values[:5] == pytest.approx([(step + 1) / 6 for step in range(5)])
    assert values[5:] == pytest.approx([0.2 + 0.8 * math.cos(math.pi * k / 90) ** 2 for k in range(46)])


def test_every_warm_up_rises_in_a_straight_line() -> None:
    rising = pytest.approx([(step + 1) / 6 for step in range(5)])
    assert [linear(step, total_steps=50, warmup=5, final=0.2) for step in range(5)] == rising
    assert [inverse_sqrt(step, total_steps=50, warmup=5) for step in range(5)] == rising
    assert [constant(step, total_steps=50, warmup=5) for step in range(5)] == rising
    assert constant(5, total_steps=50, warmup=5) == 1


def test_a_decay_of_one_step_is_done_after_one() -> None:
    assert wsd(9, total_steps=10, warmup=0, decay=1, final=0.25) == 1
    assert wsd(10, total_steps=10, warmup=0, decay=1, final=0.25) == 0.25
    assert linear(1, total_steps=1, warmup=0, final=0.25) == 0.25


def test_a_resumed_schedule_counts_its_steps_like_one_that_ran_through() -> None:
    schedules = []
    for _ in range(2):
        optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
        schedules.append(Linear(warmup=0).build(optimizer, 8))
    ran, resumed = schedules
    for _ in range(3):
        ran.optimizer.step()
        ran.step()
    resumed.load_state_dict(ran.state_dict())
    assert resumed._step_count == ran._step_count
    assert resumed.get_last_lr() == ran.get_last_lr()
