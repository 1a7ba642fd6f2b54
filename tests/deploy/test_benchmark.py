"""Benchmarks: figures that compare, not figures that must be fast."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.deploy.conftest import warmed
from tests.exports import compare_here
from torch import Tensor, nn

from arclight.deploy import Program, ProgramError, benchmark, export, quantize


class Clock:
    """Time as programs take it, and no other; in every third round the machine is ten times slower."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.calls = 0

    def program(self, *seconds: float, cpu: float = 0.0) -> Callable[[Tensor], None]:
        took = cycle(seconds)

        def call(_: Tensor) -> None:
            strain = 10 if self.calls // 2 % 3 == 2 else 1
            self.calls += 1
            self.wall += next(took) * strain
            self.cpu += cpu

        return call

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu


def test_ratios_are_those_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("arclight.deploy.programs.benchmark.time", clock)
    programs = {"slow": clock.program(0.03, cpu=0.02), "fast": clock.program(0.01)}
    table = benchmark(programs, torch.zeros(1), rounds=9)
    assert table["slow"].speedup == 1
    assert table["fast"].speedup_low == pytest.approx(3)  # a slow round is slow for both
    assert table["fast"].speedup_high == pytest.approx(3)
    assert (table["slow"].wall_ms, table["slow"].cpu_ms) == pytest.approx((30, 20))
    assert (table["fast"].wall_ms, table["fast"].cpu_ms) == pytest.approx((10, 0))


def test_the_spread_is_that_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("arclight.deploy.programs.benchmark.time", clock)
    programs = {"steady": clock.program(0.02), "other": clock.program(*(0.02 / n for n in range(1, 12)))}
    row = benchmark(programs, torch.zeros(1), rounds=11)["other"]
    assert (row.speedup_low, row.speedup, row.speedup_high) == pytest.approx((2, 6, 10))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_in_other_types_stand_beside_their_programs(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_here(monkeypatch)
    model, x = nn.Linear(4, 3).to(dtype), torch.randn(2, 4).to(dtype)
    program = export(model, tmp_path / "p.onnx", example_inputs=x)
    table = benchmark({"model": model, "program": program}, x, rounds=1, batch_sizes=[1, 3], fresh=True)
    assert [(row.name, row.batch) for row in table.rows] == [(n, b) for b in (1, 3) for n in ("model", "program")]
    with pytest.raises(ProgramError, match=r"program cannot be timed on these inputs: .*got int64"):
        benchmark({"program": program}, torch.ones(2, 4, dtype=torch.int64), rounds=1)


def test_models_of_different_types_are_not_timed_on_the_same_inputs() -> None:
    models = {str(dtype)[6:]: nn.Linear(4, 3).to(dtype) for dtype in (torch.bfloat16, torch.float64)}
    x = torch.randn(2, 4, dtype=torch.float64)
    message = "bfloat16 cannot be timed on these inputs: they are float64, and its weights are bfloat16; give inputs and models of one type"
    with pytest.raises(ProgramError, match=message):
        benchmark(models, x, rounds=1)
    assert len(benchmark({"float64": models["float64"]}, x, rounds=1).rows) == 1
    assert len(benchmark(models, x.bfloat16(), rounds=1).rows) == 2, "bfloat16 inputs are float32 for every model"


def test_models_and_programs_side_by_side(images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=1)
    layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)
    model = warmed(nn.Sequential(*layers), images)
    quantized = quantize(model, [images])
    fp32, int8 = (
        export(it, tmp_path / name, example_inputs=images) for it, name in ((model, "a.onnx"), (quantized, "b.onnx"))
    )
    model.train()
    threads = torch.get_num_threads()
    programs = {"torch": model, "simulated": quantized, "fp32": fp32, "int8": int8}
    table = benchmark(programs, images[:1], rounds=3)
    assert model.training
    assert torch.get_num_threads() == threads
    assert [row.name for row in table.rows] == list(programs)
    assert table["int8"].nbytes == int8.path.stat().st_size
    assert table["torch"].nbytes == sum(v.nbytes for v in model.state_dict().values())
    assert all(row.wall_ms > 0 and row.cpu_ms > 0 for row in table.rows)


def test_the_table_prints_and_becomes_json(fp32_program: Program, images: Tensor) -> None:
    table = benchmark({"fp32 onnx": fp32_program}, images[:2], rounds=2).with_column("mAP50", {"fp32 onnx": 0.912})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "fp32 onnx" in text
    assert "0.912" in text
    assert "2x3x64x64" in text
    flat = json.loads(json.dumps(table.json()))
    assert flat["fp32 onnx/mAP50"] == 0.912
    assert flat["fp32 onnx/speedup"] == 1
    assert all(isinstance(value, (int, float)) for value in flat.values())


def test_calls_are_interleaved_and_equal_in_number() -> None:
    calls: list[str] = []
    benchmark({"a": lambda _: calls.append("a"), "b": lambda _: calls.append("b")}, torch.zeros(1), rounds=4)
    assert calls[6:] == ["a", "b"] * 4


@pytest.mark.parametrize("wrong", [{"programs": {}}, {"rounds": 0}, {"threads": 0}])
def test_benchmark_without_programs_rounds_or_threads_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="benchmark needs"):
        benchmark(**{"programs": {"a": lambda _: None}, "inputs": torch.zeros(1), "rounds": 1, "threads": 1} | wrong)


class Tagger(nn.Module):
    """Takes token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).mean(1))


@pytest.fixture(scope="module")
def tagger_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    path = tmp_path_factory.mktemp("tagger") / "tagger.onnx"
    return export(Tagger(), path, example_inputs=torch.randint(0, 50, (4, 7)))


def test_token_ids_in_several_batches_and_threads(tagger_program: Program) -> None:
    seen: list[tuple[int, ...]] = []
    programs = {"program": tagger_program, "model": Tagger(), "seen": lambda tokens: seen.append(tuple(tokens.shape))}
    table = benchmark(programs, torch.randint(0, 50, (3, 7)), rounds=2, threads=[1, 2], batch_sizes=[1, 5])
    settings = [(1, 1), (1, 5), (2, 1), (2, 5)]
    assert [(row.name, row.threads, row.batch) for row in table.rows] == [
        (name, *setting) for setting in settings for name in programs
    ]
    assert sorted(set(seen)) == [(1, 7), (5, 7)]
    assert table["model"].batch == 1
    flat = table.json()
    assert flat["program/batch 5/threads 2/speedup"] == 1
    assert len(flat) == 4 * (10 + 9 + 7), "a model has no build time, a callable no size and no device, either"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "threads" in text
    assert "peak MB" not in text, "no process of its own was asked for"


def test_percentiles_and_throughput_are_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("arclight.deploy.programs.benchmark.time", clock)
    monkeypatch.setattr(clock, "program", lambda *_: None)
    taken = iter([9.0] * 3 + [n / 1000 for n in range(1, 102)])

    def call(_: Tensor) -> None:
        clock.wall += next(taken)

    row = benchmark({"a": call}, torch.zeros(4, 2), rounds=101).rows[0]
    assert row.wall_ms == pytest.approx(51)
    assert row.p99_ms == pytest.approx(100)
    assert row.samples_per_s == pytest.approx(4 / 0.051)


def test_build_time_is_that_of_the_description(fp32_program: Program, images: Tensor) -> None:
    table = benchmark({"program": fp32_program, "model": nn.Identity()}, images[:1], rounds=1)
    steps = fp32_program.metadata["build_s"]
    assert table.json()["program/build_s"] == pytest.approx(steps["capture"] + steps["writing"])
    assert "model/build_s" not in table.json()
    assert "build s" in [column.header for column in table.__rich__().columns]


def test_load_time_and_memory_are_those_of_a_process_of_its_own(fp32_program: Program, images: Tensor) -> None:
    hoard = torch.ones(1 << 28, dtype=torch.uint8)  # 268 MB that this process holds, and the other one does not
    started = time.perf_counter()
    table = benchmark({"program": fp32_program, "model": nn.Identity()}, images[:1], rounds=1, fresh=True)
    row = table["program"]
    assert row.load_s is not None
    assert row.peak_bytes is not None
    assert 0 < row.load_s < time.perf_counter() - started
    larger = benchmark({"program": fp32_program}, images[:1], rounds=1, batch_sizes=[256], fresh=True)["program"]
    assert larger.peak_bytes is not None
    assert larger.peak_bytes - row.peak_bytes > 256 * images[0].nbytes, "the larger batch is in it"
    assert row.peak_bytes < len(hoard) + 200e6
    assert table["model"].load_s is table["model"].peak_bytes is None


def test_inputs_that_a_program_does_not_take_are_refused_first(tagger_program: Program, images: Tensor) -> None:
    calls: list[int] = []
    programs = {"first": lambda *_: calls.append(1), "tagger": tagger_program}
    for inputs, message in {
        (images,): "tagger cannot be timed on these inputs: the program expects tokens: int64",
        (torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1)): r"tagger takes 1 inputs \(tokens: int64.*2 are given",
    }.items():
        with pytest.raises(ProgramError, match=message):
            benchmark(programs, inputs)
    with pytest.raises(ProgramError, match="hold no sample"):
        benchmark(programs, torch.zeros(0, 7, dtype=torch.int64), batch_sizes=[2])
    with pytest.raises(ValueError, match="first dimension of every input is the batch"):
        benchmark({"f": lambda *_: calls.append(1)}, (torch.zeros(2), torch.zeros(3)), batch_sizes=[2])
    for wrong in ([], [0]):
        with pytest.raises(ValueError, match="batch_sizes are 1 or more"):
            benchmark({"f": lambda *_: calls.append(1)}, torch.zeros(2), batch_sizes=wrong)
    assert not calls


def test_a_model_is_timed_where_it_is_or_refused() -> None:
    model = nn.Linear(4, 4)
    assert benchmark({"linear": model}, torch.zeros(1, 4), rounds=1)["linear"].device == "cpu"
    with pytest.raises(ValueError, match="far is on meta, and models are timed on the CPU or on CUDA"):
        benchmark({"far": copy.deepcopy(model).to("meta")}, torch.zeros(1, 4))
    split = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match="split has weights on cpu, meta"):
        benchmark({"split": split}, torch.zeros(1, 4))


def test_a_program_keeps_its_device(tagger_program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tagger_program.device == tagger_program.with_threads(1).device == "cpu"
    monkeypatch.setattr(tagger_program._session, "device", "cuda")  # as if it had been loaded there
    with pytest.raises(ProgramError, match="this ONNX Runtime has no CUDA"):
        benchmark({"program": tagger_program}, torch.zeros(1, 7, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calls_on_cuda_wait_for_the_device() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4096, 4096))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = x @ self.weight
            return x

    model = Slow().cuda()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = torch.randn(4096, 4096, device="cuda")
    with torch.inference_mode():
        model(x)
        begin.record()
        model(x)
        end.record()
        torch.cuda.synchronize()
    row = benchmark({"slow": model}, x, rounds=5)["slow"]
    assert row.device == "cuda:0"
    assert row.wall_ms > 0.5 * begin.elapsed_time(end), "queuing alone takes a fraction of it"
    assert row.figures["cuda"] == 1
