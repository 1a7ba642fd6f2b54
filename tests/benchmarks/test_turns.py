"""Contenders take turns by single steps, and each step's time goes to whoever took it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from benchmarks.text import TakingTurns
from benchmarks.trainer_overhead import Batches, Turns, beside, by_hand, in_turns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_rival_steps_between_any_two_steps(clock: list[float]) -> None:
    log: list[str] = []

    def rival(batch: Any) -> None:
        log.append("rival")
        clock[0] += 3

    turns = Turns(4, rival)
    for _ in turns:
        log.append("own")
        clock[0] += 1
    assert log == ["own", "rival"] * 4
    assert turns.own == [1] * 4
    assert turns.beside == [3] * 4


@pytest.mark.parametrize("asks_after_the_last", [True, False])
def test_windows_leave_out_the_first_and_hold_all_others(clock: list[float], asks_after_the_last: bool) -> None:
    def run(batches: Batches) -> None:
        given = iter(batches)
        for step in range(len(batches)):
            next(given)
            clock[0] += 50 if step < 100 else 2
        if asks_after_the_last:
            next(given, None)

    def rival(batch: Any) -> None:
        clock[0] += 1

    assert in_turns(run, rival, 3) == ([200] * 3, [100] * 3)


def test_every_contender_has_the_loop_that_does_the_same() -> None:
    assert beside("Trainer, 4 batches a step") == "raw loop, 4 batches a step"
    assert beside("Lightning, clipping") == "raw loop, clipping"
    assert beside("Trainer, 10 logged values, bar") == "raw loop"


def test_loops_by_hand_accumulate_as_the_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    step = by_hand(accumulate=4)
    monkeypatch.setattr("torch.optim.SGD.step", lambda self: log.append("optimizer"))
    for _ in range(9):
        log.append("batch")
        step(Batches.stored[0])
    assert log == [*(["batch"] * 4 + ["optimizer"]) * 2, "batch"]


def test_rivals_of_a_trainer_step_once_a_step_in_changing_order(clock: list[float]) -> None:
    log: list[str] = []

    def rival(name: str, seconds: float) -> Any:
        def step(batch: Any) -> None:
            log.append(name)
            clock[0] += seconds

        return step

    random.seed(0)
    turns = TakingTurns({"a": rival("a", 2.0), "b": rival("b", 3.0)}, warm=2)
    for number in range(22):
        clock[0] += 100.0 if number < 2 else 1.0
        turns.on_train_batch_end(None, None, None, {}, number)
    assert turns.seconds == {"trainer": [1.0] * 20, "a": [2.0] * 20, "b": [3.0] * 20}
    orders = {tuple(log[place : place + 2]) for place in range(0, len(log), 2)}
    assert orders == {("a", "b"), ("b", "a")}
