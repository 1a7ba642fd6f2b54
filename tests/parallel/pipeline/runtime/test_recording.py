"""Recorded steps of real processes: everything that must come before something else did, on one clock, and nothing is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.parallel.pipeline.naps import Sleeper, undisturbed
from tests.parallel.pipeline.schedule.hand_written_steps import one_forward_one_backward, run
from torch import Tensor, nn

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import Mesh, Plan, PlanError, initialize, parallelize
from arclight.parallel.pipeline.runtime.install import install
from arclight.parallel.pipeline.runtime.recording import ActionRecorder, Recording, _clock_offset, record, recorded_step
from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import Trace, bubble, busy, idle, peak_bytes
from arclight.parallel.pipeline.schedule.table import SCHEDULES, schedule_kind
from arclight.parallel.pipeline.unit_costs import UnitCost
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model

MICRO_BATCHES = 4
AHEAD = 1234.5
"""Seconds that the clock of the second process is ahead of that of the first."""
SLACK = 0.5
"""Seconds by which clocks of processes may differ after they were compared."""


class Language(nn.Module):
    """A module as a pipeline wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model("llama3-debug", vocab_size=64, dim=32, layers=4, heads=4, kv_heads=2, hidden=48)
        initialize(self.model, 3)
        self.runner: Any = None

    def split_batch(self, batch: Tensor) -> Split:
        return (batch[:, :-1],), {"positions": None, "documents": None}, batch[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def module_over(schedule: str) -> Language:
    mesh = Mesh(Plan(pp=dist.get_world_size(), schedule=schedule, micro_batches=MICRO_BATCHES))
    module = Language()
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    return module


BATCH = torch.randint(0, 64, (MICRO_BATCHES, 17), generator=torch.Generator().manual_seed(3))


QUICK = ("GPipe", "1F1B", "ZBVZeroBubble")
"""With one and two stages on a process, with split backward passes and without."""
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES]


def recorded(*kinds: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``kinds`` with clocks that differ by rank, and merge their results."""
    read = time.perf_counter
    with patch.object(time, "perf_counter", lambda: read() + AHEAD * dist.get_rank()):
        return {name: found for kind in kinds for name, found in kind().items()}


def of_schedules(schedules: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule in schedules:
        module = module_over(schedule)
        with record(skip=1, steps=2) as run:
            for _ in range(4):
                batch_loss(module, BATCH)[0].backward()
                time.sleep(0.05 * dist.get_rank())  # what processes do between steps is no part of them
        found[schedule] = run.traces
        assert run.first == (dist.get_rank() == 0)
    return found


def in_other_ways() -> dict[str, Any]:
    """Record steps with other options than the defaults, and blocks without a recorded step."""
    found: dict[str, Any] = {}
    module = module_over("1F1B")
    with record(activations=True) as run, torch.no_grad():
        batch_loss(module, BATCH)
    found["evaluated"] = run.typical
    with record(activations=True) as run:
        batch_loss(module, BATCH)
    found["saved"] = run.typical
    with record() as none:
        pass
    with pytest.raises(PlanError, match="no step was recorded"):
        _ = none.typical
    with pytest.raises(PlanError, match="cannot lie within another"), record(), record():
        pass
    with pytest.raises(ZeroDivisionError), record() as run:
        batch_loss(module, BATCH)
        _ = 1 / 0
    assert run.traces == []
    found["offset"] = _clock_offset(dist.group.WORLD, torch.device("cpu"))
    found["left"] = [
        stage.recorder for made in module.runner.engine._schedules._values.values() for stage in made._stages
    ]
    return found


def on_two(*kinds: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of :func:`recorded` on each of two real processes."""

    def run(fabric: al.Fabric) -> list[Any]:
        torch.set_num_threads(1)
        return fabric.strategy.all_gather_object(recorded(*kinds))

    return al.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="fork")).launch(run)


@pytest.fixture(scope="module")
def everywhere() -> list[dict[str, Any]]:
    return on_two(partial(of_schedules, QUICK), in_other_ways)


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    """Of the schedules that are slow."""
    return on_two(partial(of_schedules, [name for name in SCHEDULES if name not in QUICK]))


@pytest.fixture
def traces(schedule: str, request: pytest.FixtureRequest) -> list[list[Trace]]:
    """Those of a schedule, by process."""
    found = request.getfixturevalue("everywhere" if schedule in QUICK else "others")
    return [here[schedule] for here in found]


def check_order(trace: Trace) -> None:
    """Check that every action begins after those that it depends on."""
    spans = {span.action: span for span in trace.spans}
    assert len(spans) == len(trace.spans)
    last = trace.stages - 1
    for stage in range(trace.stages):
        for number in range(trace.micro_batches):
            forward = spans[Action(stage, "F", number)]
            backward = spans.get(Action(stage, "B", number)) or spans[Action(stage, "I", number)]
            assert backward.start >= forward.end
            if backward.action.kind == "I":
                assert spans[Action(stage, "W", number)].start >= backward.end
            else:
                assert Action(stage, "W", number) not in spans
            if stage < last:
                after = spans.get(Action(stage + 1, "B", number)) or spans[Action(stage + 1, "I", number)]
                assert spans[Action(stage + 1, "F", number)].start >= forward.end - SLACK
                assert backward.start >= after.end - SLACK
    for kind in "FBIW":
        for stage in range(trace.stages):
            present = [a for number in range(trace.micro_batches) if (a := Action(stage, kind, number)) in spans]
            starts = [spans[action].start for action in present]
            backwards = trace.schedule == "LoopedBFS" and kind == "B"  # the last micro-batch's first
            assert starts == sorted(starts, reverse=backwards)


@pytest.mark.parametrize("schedule", EACH)
def test_recorded_actions_follow_their_dependencies(traces: list[list[Trace]], schedule: str) -> None:
    own, other = traces
    assert own == other  # every process has all of it
    assert len(own) == 2
    for trace in own:
        kind = schedule_kind(schedule)
        assert (trace.schedule, trace.ranks, trace.micro_batches) == (schedule, 2, MICRO_BATCHES)
        assert trace.stages == 2 * kind.stages_per_process
        assert ("W" in {span.action.kind for span in trace.spans}) == kind.splits_backward
        check_order(trace)


@pytest.mark.parametrize("schedule", EACH)
def test_time_is_conserved_and_memory_is_given_back(traces: list[list[Trace]], schedule: str) -> None:
    for trace in traces[0]:
        for rank, (worked, cause) in enumerate(zip(busy(trace), idle(trace), strict=True)):
            assert worked + cause.seconds == pytest.approx(trace.seconds, rel=1e-9)
            spans = trace.of(rank)
            assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
            assert spans[-1].live == 0
            assert max(span.live for span in spans) > 0
        gaps = sum(cause.seconds - cause.cool_down for cause in idle(trace))
        assert 0 < sum(trace.waits.values()) <= gaps + 1e-9
        assert min(trace.waits.values()) >= 0


def test_memory_is_what_crosses_the_cut_or_all_that_is_saved(everywhere: list[dict[str, Any]]) -> None:
    found = everywhere[0]
    crossing = 16 * 32 * 4  # float32 (1, 16, 32) of one micro-batch
    peaks = {rank: max(span.live for span in found["GPipe"][0].of(rank)) for rank in range(2)}
    assert peaks[0] == MICRO_BATCHES * crossing
    few = {rank: max(span.live for span in found["1F1B"][0].of(rank)) for rank in range(2)}
    assert few[0] == 2 * crossing  # as many micro-batches as stages from here on
    saved = {rank: max(span.live for span in found["saved"].of(rank)) for rank in range(2)}
    assert min(saved.values()) > 10 * crossing
    assert {span.action.kind for span in found["evaluated"].spans} == {"F"}


def test_clocks_are_compared_and_nothing_is_left_behind(everywhere: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(everywhere):
        assert found["offset"] == pytest.approx(-AHEAD * rank, abs=SLACK)
        assert set(found["left"]) == {None}


def test_a_step_that_nobody_records_sets_nothing() -> None:
    class Untouchable:
        def __setattr__(self, name: str, value: object) -> None:
            raise AssertionError(name)

    with recorded_step([Untouchable()], "1F1B", 1, None, torch.device("cpu")):
        pass


def test_on_a_gpu_times_are_those_of_its_own_clock_and_memory_is_the_allocators() -> None:
    """With a device whose clock is told by the test: the host runs ahead of it and does not wait."""
    now, allocated, waited = [100.0], [5000], []  # milliseconds of the device's clock, bytes

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream == "the current stream"
            self.at = now[0]

        def elapsed_time(self, later: Event) -> float:
            assert len(waited) == 2, "read before the device was done"
            return later.at - self.at

    device = torch.device("cuda", 0)
    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "current_stream", lambda device: "the current stream"),
        patch.object(torch.cuda, "synchronize", waited.append),
        patch.object(torch.cuda, "memory_allocated", lambda device: allocated[0]),
    ):
        recorder = ActionRecorder(3, [], device, activations=True)
        for action, milliseconds, size in ((Action(1, "F", 0), 20, 700), (Action(1, "B", 0), 40, 0)):
            now[0] += 10
            with recorder.during(action):
                start = recorder.mark()
                now[0], allocated[0] = now[0] + milliseconds, 5000 + size
            recorder.record_action(action, start, ((torch.zeros(3),),))
        assert waited == [device]  # once, before the step
        first, second = recorder.spans()
    assert (first.rank, first.start, first.end, first.live) == (3, pytest.approx(0.01), pytest.approx(0.03), 700)
    assert (second.start, second.end, second.live) == (pytest.approx(0.04), pytest.approx(0.08), 0)


# -- a pipeline whose actions take known times ---------------------------------------------------------------------

SECONDS = 0.01
KNOWN = [(SECONDS, SECONDS, SECONDS)] * 4


def slept(longer: float) -> Trace:
    known = [(longer * f, longer * i, longer * w) for f, i, w in KNOWN]
    module, mesh = Sleeper(known), Mesh(Plan(pp=4, schedule="1F1B", micro_batches=8))
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    with record(skip=1, steps=3) as run:
        for _ in range(4):
            batch_loss(module, torch.ones(8, 16))[0].backward()
    return run.typical


def test_recorded_steps_match_the_prediction() -> None:
    def here(fabric: al.Fabric, longer: float) -> Trace:
        torch.set_num_threads(1)
        return slept(longer)

    costs = [UnitCost(f, i if stage else 0.0, w) for stage, (f, i, w) in enumerate(KNOWN)]  # tokens have no gradient
    predicted = simulate("1F1B", costs, 4, 8)
    expected = {span.action: span.end - span.start for span in predicted.spans}

    def check(longer: float) -> None:
        fabric = al.Fabric(accelerator="cpu", devices=4, strategy=DDPStrategy(start_method="fork"))
        measured = fabric.launch(here, longer)
        for rank in range(4):
            assert [span.action for span in measured.of(rank)] == [span.action for span in predicted.of(rank)]
        for span in measured.spans:
            assert span.end - span.start >= 0.99 * longer * expected[span.action]
        assert measured.seconds >= 0.99 * longer * predicted.seconds
        assert bubble(measured) == pytest.approx(bubble(predicted), abs=0.15)
        causes = [cause.imbalance for cause in idle(measured)]
        assert causes.index(max(causes)) == 0  # it has nothing to compute for gradients of tokens

    undisturbed(check)


def test_a_step_is_simulated_from_what_was_recorded_of_it() -> None:
    measured = run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02}, {2: 1.5}, 0.003, "1F1B")
    simulated = Recording(traces=[measured]).simulated
    wanted = run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02}, {2: 1.5})
    assert simulated.schedule == "1F1B"
    assert {span.action: span.start for span in simulated.spans} == pytest.approx(
        {span.action: span.start for span in wanted.spans}
    )
    assert peak_bytes(simulated) == peak_bytes(measured) == [4000, 3000, 2000, 1000]
