"""Requests for tensors that are computed together: when, with what answers, and what one may do to the others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tests.exports import compare_here
from torch import nn

from arclight.deploy import Program, ProgramError, export
from arclight.serve import Limits, models
from arclight.serve.admission import Refusal, Turn, Workers
from arclight.serve.app import build_app
from arclight.serve.middleware import Access
from arclight.serve.tasks import batching
from arclight.serve.tasks.batching import BatchCost, Batcher, Job, measure
from arclight.serve.tasks.tensors import compute

LIMITS = Limits()
FOUR = BatchCost(rows=4, one_ms=1.0, together_ms=1.0, largest_difference=0.0)


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class Scaled(nn.Module):
    """Rounds as dynamic int8 does: by a scale that all rows share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return (x / scale).round() * scale


def written(folder, name: str, model: nn.Module, **options: Any) -> Program:
    path = folder / f"{name}.onnx"
    export(model, path, example_inputs=torch.rand(2, 8), input_names=["x"], output_names=["y"], **options)
    return Program.load(path, threads=1)


@pytest.fixture(scope="module", autouse=True)
def _in_this_process():
    """Compare what is written here in this process."""
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batching")


@pytest.fixture(scope="module")
def program(folder) -> Program:
    torch.manual_seed(0)
    return written(folder, "net", nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)))


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The rows of each call of a program."""
    found: list[int] = []
    original = Program.__call__

    def counted(self: Program, *inputs: Any) -> Any:
        found.append(len(inputs[0]))
        return original(self, *inputs)

    monkeypatch.setattr(Program, "__call__", counted)
    return found


def body(rows: int = 1, seed: int = 0, **changes: Any) -> bytes:
    x = np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 8], "data": x.ravel().tolist()}
    return json.dumps({"id": str(seed), "inputs": [tensor | changes]}).encode()


def job(program: Program, content: bytes) -> Job:
    return Job(content, None, program, "net", "1", LIMITS)


def batcher(measured: BatchCost = FOUR) -> Batcher:
    made = Batcher(16)
    made.measured = measured
    return made


# -- measuring


def test_a_program_whose_batch_costs_less_is_measured(program):
    found = measure(program, 16)
    assert found is not None
    assert 2 <= found.rows <= 16
    assert found.together_ms < found.rows * found.one_ms * batching.PAYS
    assert found.largest_difference <= batching.TOLERANCE


@pytest.mark.parametrize("model", [Centred(), pytest.param(Scaled(), marks=pytest.mark.slow)])
def test_a_program_whose_rows_change_each_other_makes_no_batch(folder, model):
    assert measure(written(folder, type(model).__name__, model), 16) is None


def test_rows_of_pixels_that_share_a_scale_make_no_batch(folder):
    class Pixels(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaled()(x.float())

    pixels = torch.randint(0, 256, (2, 8), dtype=torch.uint8)
    export(Pixels(), folder / "pixels.onnx", example_inputs=pixels, input_names=["x"], output_names=["y"])
    assert measure(Program.load(folder / "pixels.onnx", threads=1), 16) is None
    sizes = [int(row.max()) for row in batching._rows(Program.load(folder / "pixels.onnx", threads=1), 4)[0]]
    assert sizes[0] < 2 <= 32 < sizes[3] < 128


def test_only_rows_that_are_measured_are_made(program, monkeypatch):
    made: list[int] = []
    original = batching._rows
    monkeypatch.setattr(batching, "_rows", lambda program, count: made.append(count) or original(program, count))
    monkeypatch.setattr(batching, "BUDGET_S", 0.0)
    assert measure(program, 10**12) is None
    assert made == [1, 1]


def test_programs_of_one_size_from_elsewhere_or_that_gain_nothing_make_no_batch(folder, program, monkeypatch):
    assert measure(written(folder, "fixed", nn.Linear(8, 4), dynamic_batch=False), 16) is None
    assert measure(program, 1) is None
    without = Program.load(program.path, threads=1)
    del without.metadata["parity"]
    assert measure(without, 16) is None
    original = batching._timed

    def linear(program: Program, rows: Any, size: int, times: dict[int, list[float]]) -> None:
        original(program, rows, size, times)
        times[size][-1] = 0.001 * size

    monkeypatch.setattr(batching, "_timed", linear)
    assert measure(program, 16) is None


def test_slow_programs_are_measured_for_a_bounded_time(program, calls, monkeypatch):
    monkeypatch.setattr(batching, "BUDGET_S", 0.0)
    assert measure(program, 16) is None
    assert calls == [1]


# -- a batch


def test_answers_of_a_batch_are_those_of_each_alone(program, calls):
    jobs = [job(program, body(rows, seed)) for seed, rows in enumerate((1, 2, 1, 1, 5, 3))]
    alone = [one() for one in jobs]
    calls.clear()
    sizes: list[int] = []
    together = batcher()
    together.observe(sizes.append)
    found = together.run(jobs)
    # four rows at most, in the order in which they came; five are a call of their own
    assert calls == [5, 4, 4]
    assert sizes == [1, 3, 2]
    values = [[json.loads(content)["outputs"][0]["data"] for content, _ in answers] for answers in (alone, found)]
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=batching.TOLERANCE * np.abs(one).max())
    assert [json.loads(content)["id"] for content, _ in found] == ["0", "1", "2", "3", "4", "5"]


def test_a_wrong_request_leaves_its_neighbours_alone(program):
    contents = [body(), b"{", body(0, 1), body(seed=2), body(seed=3, datatype="FP64")]
    good, malformed, empty, other, mistyped = batcher().run([job(program, content) for content in contents])
    assert (good, other) == (job(program, contents[0])(), job(program, contents[3])())
    assert isinstance(malformed, Refusal)
    assert isinstance(mistyped, Refusal)
    assert json.loads(empty[0])["outputs"][0]["shape"] == [0, 4]


def test_a_batch_that_fails_is_computed_one_by_one(program, monkeypatch, caplog):
    original = Program.__call__

    def picky(self: Program, x: np.ndarray) -> Any:
        if (x == 13).any():
            raise ProgramError("thirteen")
        return original(self, x)

    monkeypatch.setattr(Program, "__call__", picky)
    bad = body(data=[13.0] * 8)
    good, refused, other = batcher().run([job(program, content) for content in (body(), bad, body(seed=2))])
    assert isinstance(refused, Refusal)
    assert refused.sentence == "Thirteen."
    assert (good, other) == (job(program, body())(), job(program, body(seed=2))())
    assert "computed one by one" in caplog.text


# -- workers


class Gate:
    """Computes numbers together once it is opened; keeps who was computed with whom."""

    def __init__(self, rows: int) -> None:
        self.rows, self.opened, self.batches = rows, threading.Event(), []

    def rows_of(self, job: int) -> int:
        return max(1, job // 100)

    def run(self, jobs: Sequence[int]) -> list[Any]:
        self.opened.wait(30)
        self.batches.append(list(jobs))
        return [ValueError(one) if one < 0 else one * 10 for one in jobs]


async def never() -> None:
    await asyncio.Event().wait()


def ask(workers: Workers, gate: Gate, number: int, left: Callable[[], Any] = never, s: float = 30) -> asyncio.Task[Any]:
    return asyncio.create_task(workers.run("m", number, turn=Turn(s), left=left, together=gate))


def test_only_those_that_wait_for_the_same_program_are_computed_together():
    async def scenario() -> None:
        workers, gate, other = Workers(1, 16), Gate(3), Gate(3)
        asked = [ask(workers, gate, 1)]
        await asyncio.sleep(0)
        for number, which in ((2, gate), (-3, gate), (50, other), (4, gate), (5, gate)):
            asked.append(ask(workers, which, number))
        await asyncio.sleep(0)
        for one in (gate, other):
            one.opened.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [found[place] for place in (0, 1, 3, 4, 5)] == [10, 20, 500, 40, 50]
        assert isinstance(found[2], ValueError)
        assert gate.batches == [[1], [2, -3, 4], [5]]  # an idle worker waits for nobody
        assert other.batches == [[50]]
        assert workers.wait_s() == 0
        assert workers.has_idle
        workers.close()

    asyncio.run(scenario())


def test_a_worker_takes_no_more_rows_than_a_call_has():
    async def scenario() -> None:
        workers, gate = Workers(1, 16), Gate(4)
        asked = [ask(workers, gate, 1)]
        await asyncio.sleep(0)
        asked += [ask(workers, gate, number) for number in (200, 101, 201, 102, 900, 103)]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*asked)
        assert gate.batches == [[1], [200, 101], [201, 102], [900], [103]]  # in the order in which they came
        assert workers.has_idle
        workers.close()

    asyncio.run(scenario())


def test_rows_are_read_before_a_request_is(program):
    made = batcher()
    contents = [body(3), body(0), b"{", body(2)[:20] + b" " * 5000 + body(2)[20:], bytearray(body(7))]
    assert [made.rows_of(job(program, content)) for content in contents] == [3, 1, 1, 1, 7]


def test_tensors_for_a_detector_are_computed_together(program):
    photos = models.ServedModel(
        name="d", precision="fp32", detector=lambda photo: None, program=program, loaded=program, batcher=Batcher(16)
    )
    models.start(photos)
    assert photos.batcher.rows > 1


def test_a_detector_whose_program_takes_no_such_batch_is_served(program, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise ProgramError("no batch of two")

    monkeypatch.setattr(batching, "measure", fail)
    photos = models.ServedModel(
        name="d", precision="fp32", detector=lambda photo: None, program=program, loaded=program, batcher=Batcher(16)
    )
    models.start(photos)
    assert photos.batcher.rows == 1
    assert "its first request may be slow: no batch of two" in caplog.text


def test_deadlines_and_leaving_clients_within_a_batch():
    async def scenario() -> None:
        workers, gate, gone = Workers(1, 16), Gate(8), asyncio.Event()
        first = ask(workers, gate, 1)
        await asyncio.sleep(0)
        leaves_waiting = ask(workers, gate, 2, left=gone.wait)
        late = ask(workers, gate, 3, s=0.05)
        leads, stays = ask(workers, gate, 4, left=gone.wait), None
        await asyncio.sleep(0.1)
        gone.set()
        refused = await asyncio.gather(leaves_waiting, late, leads, return_exceptions=True)
        assert [one.status for one in refused] == [400, 503, 400]
        again = asyncio.Event()
        leads, stays = ask(workers, gate, 5, left=again.wait), ask(workers, gate, 6)
        await asyncio.sleep(0)
        gate.opened.set()
        assert await first == 10
        again.set()  # as its batch may be under way
        assert await stays == 60
        await asyncio.gather(leads, return_exceptions=True)
        assert gate.batches == [[1], [5, 6]]
        cancelled = ask(workers, gate, 7)
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await ask(workers, gate, 8) == 80
        assert workers.has_idle
        workers.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_as_its_batch_is_computed_fails_nobody():
    async def scenario() -> None:
        workers, gate, gone = Workers(1, 16), Gate(8), asyncio.Event()
        first = ask(workers, gate, 1)
        await asyncio.sleep(0)
        leads, stays, ends = ask(workers, gate, 2, left=gone.wait), ask(workers, gate, 3), ask(workers, gate, 4)
        await asyncio.sleep(0)
        gate.opened.set()
        await first
        gate.opened.clear()  # the batch of the three may have passed or not
        gone.set()
        ends.cancel()
        await asyncio.sleep(0)
        gate.opened.set()
        assert await stays == 30
        assert await leads == 20
        assert [1] in gate.batches
        assert workers.has_idle
        workers.close()

    asyncio.run(scenario())


# -- a server


def test_requests_of_one_moment_are_computed_together_and_shown(program, calls):
    model = models.load("net", program.path, Limits())
    app = build_app([model], Limits(), Access())
    with TestClient(app) as client:
        assert model.batcher.measured is not None
        calls.clear()
        rows = model.batcher.rows

        async def several() -> list[Any]:
            return await asyncio.gather(*(model.batcher.run_here(job(program, body(seed=n))) for n in range(rows)))

        answers = client.portal.call(several)
        assert calls == [rows]
        shown = client.get("/models").json()[0]["batch"]
        text = client.get("/metrics").text
        [one] = [client.post("/v2/models/net/infer", content=body(seed=1)).json()]
    assert one["outputs"][0]["data"] == pytest.approx(json.loads(answers[1][0])["outputs"][0]["data"], rel=1e-4)
    assert shown["rows"] == rows
    assert shown["largest_difference"] <= batching.TOLERANCE
    assert f'arclight_batch_requests_sum{{model="net"}} {float(rows)}' in text
    assert 'arclight_batch_requests_count{model="net"} 1.0' in text


def test_a_limit_of_one_makes_no_batch(program):
    model = models.load("net", program.path, Limits(batch=1))
    models.start(model)
    assert model.batcher.measured is None
    assert model.batcher.rows == 1


def test_two_inputs_of_different_lengths_are_a_call_of_their_own(folder, calls):
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y

    export(Sum(), folder / "sum.onnx", example_inputs=(torch.rand(2, 3), torch.rand(2, 3)), input_names=["x", "y"])
    program = Program.load(folder / "sum.onnx", threads=1)

    def request(rows: Sequence[int]) -> bytes:
        tensors = [
            {"name": name, "datatype": "FP32", "shape": [size, 3], "data": [1.0] * 3 * size}
            for name, size in zip("xy", rows)
        ]
        return json.dumps({"inputs": tensors}).encode()

    calls.clear()
    good, _, other = batcher().run([job(program, request(rows)) for rows in ((1, 1), (2, 1), (1, 1))])
    assert json.loads(good[0])["outputs"][0]["data"] == json.loads(other[0])["outputs"][0]["data"] == [3.0] * 3
    assert sorted(calls) == [2, 2]
    assert [len(value) for value in compute(program, [np.ones((1, 3), np.float32)] * 2)] == [1]
