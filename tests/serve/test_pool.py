"""Shares of the cores for requests to a program: measured once at its load, within a budget, unless set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.exports import compare_here
from torch import nn

from arclight.deploy import Program, export
from arclight.deploy.programs import program as programs
from arclight.deploy.programs.onnx_runtime import OnnxRuntimeSession
from arclight.fabric.launchers import available_cores
from arclight.fabric.signing import SigningKey
from arclight.serve import Limits, models
from arclight.serve.admission import LatencyWindow
from arclight.serve.app import ModelDescription, Service
from arclight.serve.settings import Limits as Settings
from arclight.serve.tasks import pool
from arclight.serve.tasks.pool import Pool, PoolRate, Share, pooled, shares


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        place = tmp_path_factory.mktemp("pool") / "net.onnx"
        export(nn.Linear(8, 4), place, example_inputs=torch.rand(2, 8), input_names=["x"], output_names=["y"])
    return place


@pytest.fixture
def _slow(monkeypatch):
    """Any call counts as long enough to be measured."""
    monkeypatch.setattr(LatencyWindow, "QUICK_S", 0.0)


def rated(monkeypatch: pytest.MonkeyPatch, rates: Mapping[Share, float]) -> list[set[Share]]:
    """Let shares have these requests per second; returns which were opened each time."""
    opened: list[set[Share]] = []

    def measure(programs: Mapping[Share, Program], *_: Any) -> dict[Share, float]:
        opened.append(set(programs))
        assert all((one.requests, one.threads or 4) == share for share, one in programs.items())
        return {share: rates[share] for share in programs}

    monkeypatch.setattr(pool, "measure", measure)
    return opened


@pytest.mark.parametrize(
    ("workers", "cores", "expected"),
    [
        (2, 1, [(1, 1)]), (1, 8, [(1, 8)]), (2, 2, [(1, 2), (2, 1)]), (2, 16, [(1, 16), (2, 8)]), (1000, 2, [(1, 2), (2, 1)]),
        (6, 16, [(1, 16), (6, 2), (2, 8), (4, 4)]), (8, 16, [(1, 16), (8, 2), (2, 8), (4, 4)]),
    ],
)  # fmt: skip
def test_the_cores_are_shared_between_one_request_and_as_many_as_there_are_workers(workers, cores, expected):
    assert shares(workers, cores) == expected


RATES: dict[Share, float] = {(1, 4): 100.0, (2, 2): 100.0, (4, 1): 100.0}


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("best", [(1, 4), (2, 2), (4, 1)])
def test_the_share_with_most_requests_per_second_is_chosen(path, runtime, best, monkeypatch):
    opened = rated(monkeypatch, RATES | {best: 150.0})
    threads = 1 if runtime == "onnxruntime" else None
    program, found = pooled(Program.load(path, runtime=runtime, threads=threads), workers=4, cores=4, load_s=0.01)
    assert opened == [set(RATES)]
    assert found is not None
    assert (found.requests, found.threads) == (program.requests, program.threads or 4) == best
    assert found.measured == tuple(
        PoolRate(requests=share[0], threads=share[1], requests_per_s=150.0 if share == best else 100.0)
        for share in sorted(RATES)
    )
    if runtime == "openvino":
        assert program._session._compiled.get_property("NUM_STREAMS") == min(best[0], available_cores())
    x = np.ones((3, 8), np.float32)
    np.testing.assert_allclose(program(x), Program.load(path)(x), rtol=1e-5)


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize(("runtime", "usual"), [("onnxruntime", (4, 1)), ("openvino", (1, 4))])
def test_a_gain_that_noise_may_have_made_changes_nothing(path, runtime, usual, monkeypatch):
    rated(monkeypatch, RATES | {(2, 2): 100.0 * pool.GAIN - 1})
    threads = 1 if runtime == "onnxruntime" else None
    before = Program.load(path, runtime=runtime, threads=threads)
    program, found = pooled(before, workers=4, cores=4, load_s=0.01)
    assert program._session is before._session
    assert found is not None
    assert (found.requests, found.threads) == usual


class Clock:
    """Seconds that pass as programs are opened and called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_s: float, open_s: float) -> None:
        self.now, self.opened, self.lock = 0.0, 0, threading.Lock()
        call, opening = Program.__call__, Program.with_threads

        def called(program: Program, *inputs: Any) -> Any:
            with self.lock:
                self.now += call_s
            return call(program, *inputs)

        def with_threads(program: Program, *args: Any, **options: Any) -> Program:
            self.now += open_s
            self.opened += 1
            return opening(program, *args, **options)

        monkeypatch.setattr(Program, "__call__", called)
        monkeypatch.setattr(Program, "with_threads", with_threads)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("call_s", "open_s", "opened"),
    [
        (0.002, 0.1, 1), (0.05, 0.1, 1), (0.2, 0.1, 0), (5.0, 0.1, 0), (0.01, 1.9, 0), (0.01, 60.0, 0), (LatencyWindow.QUICK_S / 2, 0.1, 0),
    ],
)  # fmt: skip
def test_loading_takes_at_most_the_budget_longer(path, call_s, open_s, opened, monkeypatch):
    program = Program.load(path, threads=1)
    clock = Clock(monkeypatch, call_s, open_s)
    _, found = pooled(program, workers=2, cores=2, load_s=open_s, clock=clock)
    assert clock.opened == opened
    assert (found is not None) == bool(opened)
    assert clock.now <= max(pool.BUDGET_S, 2 * call_s)


@pytest.mark.usefixtures("_slow")
def test_programs_without_a_choice_are_not_measured(path, monkeypatch):
    opened = rated(monkeypatch, RATES)
    for workers, cores in ((2, 1), (1, 4)):
        program = Program.load(path, threads=1)
        assert pooled(program, workers=workers, cores=cores, load_s=0) == (program, None)
    foreign = Program.load(path, threads=1)
    del foreign.metadata["parity"]
    assert pooled(foreign, workers=2, cores=2, load_s=0) == (foreign, None)
    torch_runs = Program.load(path, threads=1)
    torch_runs.runtime = "torch"
    assert pooled(torch_runs, workers=2, cores=2, load_s=0) == (torch_runs, None)
    assert opened == []


def test_requests_are_really_computed_at_once_or_in_turns(path, monkeypatch):
    monkeypatch.setattr(OnnxRuntimeSession, "run", lambda self, values: time.sleep(0.02) or [values[0][:, :4]])
    program, found = pooled(Program.load(path, threads=1), workers=2, cores=2, load_s=0.01)
    assert found is not None
    assert (found.requests, found.threads) == (2, 1) == (program.requests, program.threads)
    one, two = found.measured
    assert (one.requests, two.requests) == (1, 2)
    assert two.requests_per_s > 1.5 * one.requests_per_s, "a call that sleeps needs no core"


@pytest.mark.parametrize("requests", [1, 2])
def test_no_more_calls_than_asked_for_are_computed_at_once(path, requests, monkeypatch):
    running, most, lock = 0, 0, threading.Lock()

    def run(self: OnnxRuntimeSession, values: list[Any]) -> list[Any]:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.02)
        with lock:
            running -= 1
        return [values[0][:, :4]]

    monkeypatch.setattr(OnnxRuntimeSession, "run", run)
    program = Program.load(path, threads=1, requests=requests)
    assert program.is_free
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(program.with_processing(None), np.ones((1, 8), np.float32)) for _ in range(8)]
        time.sleep(0.005)
        assert not program.is_free
        for call in calls:
            call.result()
    assert most == requests
    assert program.is_free
    with pytest.raises(ValueError, match="requests must be at least 1, got 0"):
        program.with_threads(1, requests=0)


# -- a server


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was measured")


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(models, "available_cores", lambda: count)


@pytest.mark.usefixtures("_slow")
def test_a_model_says_what_was_measured_and_what_replaces_it_takes_that_over(path, monkeypatch):
    cores(monkeypatch, 4)
    rated(monkeypatch, {(1, 4): 170.0, (2, 2): 100.0})
    old = models.load("net", path, Limits())
    assert old.loaded is old.program
    assert ModelDescription.of(old).threads == 4
    shown = ModelDescription.of(old).pool
    assert shown == Pool(
        requests=1, threads=4,
        measured=(PoolRate(requests=1, threads=4, requests_per_s=170.0), PoolRate(requests=2, threads=2, requests_per_s=100.0)),
    )  # fmt: skip
    monkeypatch.setattr(models, "pooled", fail)
    monkeypatch.setattr(programs, "fastest", fail)
    new = models.load("net", path, Limits(), runtime="fastest", old=old)  # requests go on meanwhile
    assert new.pool == old.pool
    assert new.loaded is not None
    assert (new.loaded.requests, new.loaded.threads, new.loaded.runtime) == (1, 4, "onnxruntime")
    other = models.load("net", path, Limits(), runtime="openvino", old=old)
    assert other.pool == Pool(requests=1, threads=4), "the figures are of another runtime"


@pytest.mark.usefixtures("_slow")
def test_a_share_outlives_a_program_that_cannot_have_it(path, tmp_path, monkeypatch):
    cores(monkeypatch, 4)
    rated(monkeypatch, {(1, 4): 100.0, (2, 2): 170.0})
    measured = models.load("net", path, Limits())
    assert measured.pool is not None
    assert (measured.pool.requests, measured.pool.threads) == (2, 2)
    monkeypatch.setattr(models, "pooled", fail)
    other, key = tmp_path / "other", SigningKey.make(tmp_path / "key.pem")
    export(
        nn.Linear(8, 4),
        other,
        format="pt2",
        sign=key,
        example_inputs=torch.rand(2, 8),
        input_names=["x"],
        output_names=["y"],
    )
    in_torch = models.load("net", other, Limits(), trusted=[key.public], old=measured)
    again = models.load("net", other, Limits(), trusted=[key.public], old=in_torch)
    assert in_torch.pool is again.pool is None
    back = models.load("net", path, Limits(), old=again)
    assert back.pool == Pool(requests=2, threads=2)
    assert back.loaded is not None
    assert (back.loaded.requests, back.loaded.threads) == (2, 2)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_setting_decides_without_a_measurement(path, runtime, monkeypatch):
    monkeypatch.setattr(models, "pooled", fail)
    cores(monkeypatch, 8)
    for limits, expected in (
        (Settings(requests=2), (2, 4)), (Settings(requests=16, workers=16), (16, 1)), (Settings(requests=2, threads=3), (2, 3)),
    ):  # fmt: skip
        model = models.load("net", path, limits, runtime=runtime)
        assert model.pool == Pool(requests=expected[0], threads=expected[1])
        assert model.loaded is not None
        assert (model.loaded.requests, model.loaded.threads) == expected
    given = models.load("net", path, Settings(threads=3), runtime=runtime)
    assert given.pool is None
    assert given.loaded is not None
    assert (given.loaded.requests, given.loaded.threads) == (None, 3)


@pytest.mark.usefixtures("_slow")
def test_one_core_leaves_nothing_to_measure(path, monkeypatch):
    cores(monkeypatch, 1)
    monkeypatch.setattr(pool, "measure", fail)
    model = models.load("net", path, Limits())
    assert model.pool is None
    assert model.loaded is not None
    assert (model.loaded.requests, model.loaded.threads) == (None, 1)


def test_language_programs_compute_all_of_their_texts_together():
    metadata = {"task": "language"}
    given = Settings(requests=2)
    assert (
        models.requests_of("onnxruntime", metadata, given) is models.threads_of("onnxruntime", metadata, given) is None
    )
    assert models.requests_of("torch", {}, given) is None
    assert models.requests_of("openvino", {}, given) == 2


def test_the_loop_computes_nothing_that_would_wait_for_its_turn(path, monkeypatch):
    monkeypatch.setattr(LatencyWindow, "QUICK_S", 10.0)
    model = models.load("net", path, Settings(requests=1))
    models.start(model)
    service = Service([model], Limits(), None, lambda name, requests: None)
    assert service.is_quick(model, 100)
    assert model.program is not None
    begun, ends = threading.Event(), threading.Event()

    def run(self: OnnxRuntimeSession, values: list[Any]) -> list[Any]:
        begun.set()
        ends.wait(30)
        return [values[0][:, :4]]

    monkeypatch.setattr(OnnxRuntimeSession, "run", run)
    compute: Callable[[], Any] = lambda: model.program(np.ones((1, 8), np.float32))  # noqa: E731
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(compute)
        assert begun.wait(30)
        assert not service.is_quick(model, 100)
        ends.set()
        call.result()
    assert service.is_quick(model, 100)


def test_more_requests_at_once_than_workers_are_refused():
    with pytest.raises(ValueError, match=r"limits\.requests \(4\) at once are more than limits\.workers \(1\)"):
        Settings(requests=4, workers=1)
