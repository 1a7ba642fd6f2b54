"""Benchmarks: figures that compare, not figures that must be fast."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from arclight.deploy import Program, QuantizedModel, benchmark


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


def test_models_and_programs_side_by_side(
    model: nn.Module, quantized: QuantizedModel, fp32_program: Program, int8_program: Program, images: Tensor
) -> None:
    model.train()
    threads = torch.get_num_threads()
    programs = {"torch": model, "simulated": quantized, "fp32": fp32_program, "int8": int8_program}
    table = benchmark(programs, images[:1], rounds=3)
    assert model.training
    model.eval()
    assert torch.get_num_threads() == threads
    assert [row.name for row in table.rows] == list(programs)
    assert table["int8"].nbytes == int8_program.path.stat().st_size
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
def test_nothing_to_measure_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="benchmark needs"):
        benchmark(**{"programs": {"a": lambda _: None}, "inputs": torch.zeros(1), "rounds": 1, "threads": 1} | wrong)
