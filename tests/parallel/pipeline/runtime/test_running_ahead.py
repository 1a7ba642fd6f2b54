"""A host that runs ahead of its devices never deadlocks, and its errors are explained in a sentence."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.pipeline.runtime.test_failures import PROCESSES, everyone
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from arclight.parallel.pipeline.runtime import failure_store
from arclight.parallel.pipeline.runtime.failure_store import DeviceSteps, FailureStore, StageLostError
from arclight.parallel.pipeline.runtime.runner import ScaleMismatch
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology
from arclight.parallel.pipeline.runtime.tied_parameters import BUCKET, TiedParameters
from arclight.parallel.pipeline.schedule.table import SCHEDULES

NOW = datetime.timedelta(seconds=0.01)


class FakeBoard:
    rank = 0

    def __init__(self) -> None:
        self.failure: str | None = None

    def first_failure(self) -> str | None:
        return self.failure


def steps(board: Any, timeout: datetime.timedelta = NOW) -> tuple[DeviceSteps, list[Any]]:
    events: list[Any] = []

    def record() -> Any:
        events.append(SimpleNamespace(over=False))
        events[-1].query = lambda event=events[-1]: event.over
        return events[-1]

    return DeviceSteps(board, timeout, record), events


def test_the_host_is_no_more_than_two_steps_ahead_and_names_who_failed() -> None:
    board = FakeBoard()
    device, events = steps(board)
    device.wait()  # nothing was done yet
    device.add()
    device.wait()  # one step may be under way
    device.add()
    with pytest.raises(StageLostError, match="process 0 has waited 0 s for its device to end a step"):
        device.wait()
    events[0].over = True
    device.wait()
    board.failure = "process 3 (stage 3) failed in 3F0: KeyError"
    with pytest.raises(
        StageLostError, match=r"process 0 stops because of another: process 3 \(stage 3\) failed in 3F0"
    ):
        device.wait(0)
    events[1].over = True
    device.wait(0)  # what is over needs nobody


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


@pytest.mark.parametrize("seconds", [0.0015, 0.0333, 0.0519, 0.21, 1.03])
def test_the_end_of_a_step_is_seen_in_time_and_asks_the_store_seldom(seconds: float, monkeypatch: Any) -> None:
    clock, asked = Clock(), list[float]()
    monkeypatch.setattr(failure_store, "time", clock)
    board = SimpleNamespace(rank=0, first_failure=lambda: asked.append(clock.now))
    event = SimpleNamespace(query=lambda: clock.now >= seconds)
    device = DeviceSteps(board, datetime.timedelta(seconds=60), lambda: event)
    device.add()
    device.wait(0)
    assert clock.now < 1.03 * seconds + 0.0001  # a device that waits for its host has nothing to do
    assert len(asked) <= seconds / 0.05
    assert clock.sleeps < 500


def test_scales_that_are_unlike_are_named_when_they_are_known() -> None:
    found, over = ScaleMismatch(), SimpleNamespace(query=lambda: over.now, now=False)
    found.note(torch.tensor(True), over)
    found.raise_if_found()  # the device has not come to it
    over.now = True
    with pytest.raises(RuntimeError, match="give the module a batch_weight"):
        found.raise_if_found()
    found.raise_if_found()
    found.note(torch.tensor(False), None)
    with pytest.raises(RuntimeError, match="give the module a batch_weight"):
        found.note(torch.tensor(True), None)


@pytest.fixture
def eight_processes() -> Any:
    """One of eight processes whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    yield
    dist.destroy_process_group()


def test_parameters_of_some_stages_need_no_group_of_their_own(eight_processes: None, monkeypatch: Any) -> None:
    topology = PipelineTopology(dist.new_group(list(range(4))), 4, SCHEDULES["1F1B"], torch.device("cpu"))

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a group is made, which the four other processes would have to enter")

    monkeypatch.setattr(dist, "new_group", refused)
    stage = nn.Linear(2, 2, bias=False)
    shared = TiedParameters(topology, {1: stage}, {"weight": (1, 3)})
    gradients: dict[nn.Parameter, Any] = {stage.weight: torch.ones(2, 2)}
    shared.sum(gradients)
    assert gradients[stage.weight].shape == (2, 2)


def _sums(rank: int) -> None:
    """Stages 0, 1 and 3 have a large parameter, 0 and 2 a small one, of which 2 has no gradient."""
    topology = PipelineTopology(dist.group.WORLD, PROCESSES, SCHEDULES["1F1B"], torch.device("cpu"))
    users = {"large": (0, 1, 3), "small": (0, 2)}
    stage = nn.Module()
    for name, size in (("large", BUCKET // 8 + 3), ("small", 5)):
        if rank in users[name]:
            stage.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))
    gradients: dict[nn.Parameter, Any] = {
        p: torch.arange(p.numel(), dtype=torch.float64) * (rank + 1)
        for name, p in stage.named_parameters()
        if (rank, name) != (2, "small")
    }
    shared = TiedParameters(topology, {rank: stage}, users)
    shared.sum(gradients)
    for name, total in (("large", 1 + 2 + 4), ("small", 1)):
        if rank in users[name]:
            gradient = gradients[stage.get_parameter(name)]
            assert torch.equal(gradient, torch.arange(gradient.numel(), dtype=torch.float64) * total), name
    assert len(shared.counted_by_others) == {0: 0, 1: 1, 2: 1, 3: 1}[rank]


def test_gradients_of_parameters_of_some_stages_are_summed_over_these(tmp_path: Path) -> None:
    said = everyone(tmp_path, _sums, limit=60)
    assert len(said) == PROCESSES
    assert all(text.endswith("finished") for text in said.values()), said


def test_a_rank_does_not_read_its_own_failure_report() -> None:
    store = dist.HashStore()
    board = object.__new__(FailureStore)
    board.rank, board._store = 0, store
    assert board.first_failure() is None
    board.report("mine")
    assert board.first_failure() is None
    board.rank = 1
    assert board.first_failure() == "mine"
