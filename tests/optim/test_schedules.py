"""Schedules against their closed forms."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.processes import run
from torch import nn

import arclight as al
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
    with pytest.raises(ValueError, match=r"1\.5 is not a share of the steps"):
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
    with pytest.raises(ValueError, match=r"needs an end: set trainer\.max_steps"):
        WSD().build(optimizer, float("inf"))
    wrong: list[tuple[Any, str, float]] = [(WSD, "final", -1.0), (InverseSqrt, "timescale", -3), (Cosine, "rewarm", -1)]
    for kind, name, value in wrong:
        with pytest.raises(ValueError, match=f"^{name}: need .*, got {value}$"):
            kind(**{name: value})
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


def test_a_schedule_over_tokens_goes_by_what_was_read() -> None:
    settings, read = WSD(tokens=1000, warmup=100, decay=0.5), [30, 70, 300, 100, 250, 200, 100]
    optimizer = AdamW(lr=1.0).build([("w", nn.Parameter(torch.ones(2)))])
    schedule, rates, saved = settings.build(optimizer, 3, counts_tokens=True), [], None
    for number, tokens in enumerate(read):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.advance(tokens)
        schedule.step()
        if number == 3:
            saved = optimizer.state_dict(), schedule.state_dict()
    begins = [sum(read[:number]) for number in range(len(read))]
    assert rates == [wsd(start, total_steps=1000, warmup=100, decay=0.5, final=0.0) for start in begins]
    assert 0 < rates[-1] < rates[-2] < 1
    assert saved is not None
    other = AdamW(lr=1.0).build([("w", nn.Parameter(torch.ones(2)))])
    resumed = settings.build(other, 3, counts_tokens=True)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for expected, tokens in zip(rates[4:], read[4:], strict=True):
        assert other.param_groups[0]["lr"] == expected
        other.step()
        resumed.advance(tokens)
        resumed.step()


def test_a_schedule_over_tokens_resumed_within_a_window_has_the_rate_of_its_step() -> None:
    def built() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
        return optimizer, Linear(tokens=1000, warmup=0).build(optimizer, 3, counts_tokens=True)

    optimizer, schedule = built()
    schedule.advance(200)
    optimizer.step()
    schedule.step()
    schedule.advance(300)  # a micro-batch of the next update, after which the run is saved
    other, resumed = built()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.8)
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == [pytest.approx(0.5)]


def test_a_schedule_over_seconds_keeps_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.5, 104.0, 5000.0, 5002.0])  # the process that resumes has another clock
    monkeypatch.setattr("arclight.optim.schedules.time.monotonic", lambda: next(clock))
    settings = Linear(seconds=10.0, warmup=1)

    def stepped_by_clock(steps: int, state: Any = None) -> tuple[list[float], Any]:
        optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
        schedule, rates = settings.build(optimizer, 3), []
        if state is not None:
            optimizer.load_state_dict(state[0])
            schedule.load_state_dict(state[1])
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, (optimizer.state_dict(), schedule.state_dict())

    def at(seconds: float) -> float:
        return linear(round(seconds * 1000), total_steps=10_000, warmup=1000, final=0.0)

    rates, state = stepped_by_clock(3)
    assert rates == [at(0), at(1.5), at(4)]
    assert state[1]["position"] == 4000
    assert stepped_by_clock(2, state)[0] == [at(4), at(6)]


def test_steps_shorter_than_a_tick_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(7 + number / 4000 for number in range(50))
    monkeypatch.setattr("arclight.optim.schedules.time.monotonic", lambda: next(clock))
    optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
    schedule = Linear(seconds=1.0).build(optimizer, 40)
    schedule.start_clock()
    for _ in range(40):
        optimizer.step()
        schedule.step()
    assert schedule.position == 10  # ms, of 40 steps of 0.25


def test_a_fit_counts_its_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed after each update, a run over seconds would not move on at all."""
    now = [100.0]
    monkeypatch.setattr("arclight.optim.schedules.time.monotonic", lambda: now[0])

    class Slow(al.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            now[0] += 2.0
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = SGD(lr=1.0).build(self.named_parameters())
            schedule = Linear(seconds=10.0, warmup=0).build(optimizer, 3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Slow()
    trainer = al.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(3, 1)))
    assert module.lr_schedulers().position == 6000


def clocks_agree(rank: int, count: int) -> None:
    optimizer = SGD(lr=1.0, momentum=0.0).build([("w", nn.Parameter(torch.ones(2)))])
    schedule = Linear(seconds=60.0).build(optimizer, 3)
    for _ in range(3):
        time.sleep(0.02 * rank)
        optimizer.step()
        schedule.step()
    everyones: list[Any] = [None] * count
    dist.all_gather_object(everyones, (schedule.position, schedule.get_last_lr()))
    assert everyones == [everyones[0]] * count


def test_ranks_go_by_one_clock(tmp_path: Path) -> None:
    run(2, tmp_path, clocks_agree, 2)


def test_schedules_over_tokens_and_seconds_refuse_what_they_cannot_count() -> None:
    optimizer = AdamW().build([("w", nn.Parameter(torch.ones(2)))])
    with pytest.raises(ValueError, match="tokens = 100: this task counts no tokens"):
        Cosine(tokens=100).build(optimizer, 10)
    with pytest.raises(ValueError, match="leave one out"):
        Cosine(tokens=100, seconds=5.0)
    with pytest.raises(ValueError, match="seconds: need"):
        Cosine(seconds=float("inf"))
    with pytest.raises(
        ValueError, match=r"warmup = 4 \(4 seconds\) and decay = 0.5 \(2.5 seconds\) do not fit into a run of 5 seconds"
    ):
        WSD(seconds=5.0, warmup=4, decay=0.5).build(optimizer, 10)
    for nothing in ({"warmup": 0}, {"warmup": 0.0}):
        with pytest.raises(ValueError, match="set timescale, tokens until it has fallen"):
            InverseSqrt(tokens=10**6, **nothing).build(optimizer, 10, counts_tokens=True)
        InverseSqrt(tokens=10**6, timescale=10**5, **nothing).build(optimizer, 10, counts_tokens=True)
        InverseSqrt(**nothing).build(optimizer, 10)
    stepwise = Cosine().build(optimizer, 10).state_dict()
    with pytest.raises(ValueError, match="ran over steps and is resumed over tokens"):
        Cosine(tokens=100).build(optimizer, 10, counts_tokens=True).load_state_dict(stepwise)
