"""Programs in another runtime than they were exported for: compared at the load, and timed where the fastest is wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.exports import compare_here
from torch import nn

from arclight.deploy import Program, ProgramError, export
from arclight.deploy.formats import export as exporting
from arclight.deploy.programs import folder as folders
from arclight.deploy.programs import other_runtime
from arclight.deploy.programs.openvino import OpenVinoSession
from arclight.deploy.programs.session import Array

Change = Callable[[list[Array]], list[Array]]


class Boxes(nn.Module):
    """Rows of two coordinates in pixels and a score, as those of a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.layer(x)
        return torch.cat((rows[..., :2] * 640, rows[..., 2:].sigmoid() * 0.1), -1)


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embedding(tokens) * weights[..., None])


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        yield


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("boxes") / "boxes.onnx"
    export(Boxes(), path, example_inputs=torch.rand(2, 6, 8) * 3, output_names=["rows"])
    return path


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tags") / "tags"
    free = {"tokens": {0: "batch", 1: "time"}, "weights": {0: "batch", 1: "time"}}
    tokens, weights = torch.randint(3, 11, (3, 6)), torch.rand(3, 6)
    export(Tags(), path, example_inputs=(tokens, weights), dynamic=free, format="onnx")
    return path


def change_openvino(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let OpenVINO compute something else."""
    original = OpenVinoSession.run

    def run(self: OpenVinoSession, values: Sequence[Array]) -> list[Array]:
        return change([output.copy() for output in original(self, values)])

    monkeypatch.setattr(OpenVinoSession, "run", run)


def test_another_runtime_is_compared_output_by_output(boxes: Path) -> None:
    own = Program.load(boxes)
    assert own.choice.exported_for == own.runtime == "onnxruntime"
    assert own.choice.sqnr_db is None
    assert own.choice.summary(own.runtime) == "It runs in ONNX Runtime."
    other = Program.load(boxes, runtime="openvino", threads=1)
    assert (other.runtime, other.choice.exported_for) == ("openvino", "onnxruntime")
    assert set(other.choice.parity) == {"rows"}
    assert other.choice.sqnr_db is not None
    assert other.choice.sqnr_db > 90
    assert re.fullmatch(
        r"It runs in OpenVINO, and agrees with itself in ONNX Runtime, which it was exported for, to (\d+ dB|every bit)\.",
        other.choice.summary(other.runtime),
    )
    assert other.with_threads(2).choice is other.choice
    x = np.random.default_rng(0).random((4, 6, 8), np.float32)
    np.testing.assert_allclose(other(x), own(x), rtol=1e-4)


def noisy(outputs: list[Array]) -> list[Array]:
    return [output * 1.001 for output in outputs]


def no_scores(outputs: list[Array]) -> list[Array]:
    outputs[0][..., 2] = 0
    return outputs


def nan(outputs: list[Array]) -> list[Array]:
    outputs[0][0] = math.nan
    return outputs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            noisy,
            r"rows in OpenVINO differs from ONNX Runtime, which it was exported for, .* 1e-04 of its largest value",
        ),
        (no_scores, r"place 2 of its last dimension \(0\.0 dB\) needs 30 dB"),
        (nan, "cannot be compared with ONNX Runtime, .* NaN or infinite in other places"),
    ],
)
def test_a_runtime_that_computes_something_else_is_refused(
    boxes: Path, change: Change, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_openvino(monkeypatch, change)
    with pytest.raises(ProgramError, match=said):
        Program.load(boxes, runtime="openvino")
    assert Program.load(boxes, runtime="openvino", parity=False).choice.sqnr_db is None


def test_quantized_programs_are_given_their_rounding_noise(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "precision", property(lambda self: "4-bit weights"))
    change_openvino(monkeypatch, lambda outputs: [output * 1.01 for output in outputs])
    found = Program.load(boxes, runtime="openvino")
    assert found.choice.sqnr_db == pytest.approx(40, abs=0.5)
    with monkeypatch.context() as patch:
        change_openvino(patch, no_scores)
        with pytest.raises(ProgramError, match="needs 6 dB"):
            Program.load(boxes, runtime="openvino")
    change_openvino(monkeypatch, lambda outputs: [output * 1.04 for output in outputs])  # after 1.01: 26 dB
    with pytest.raises(ProgramError, match="4-bit weights programs need 30 dB"):
        Program.load(boxes, runtime="openvino")
    opened = Program.__init__

    def noisier(self: Program, path: Path, session: Any, metadata: dict[str, Any], *rest: Any, **more: Any) -> None:
        noise = {"against_float": {"outputs": {"rows": {"sqnr_db": 25.0}}}}
        opened(self, path, session, metadata | {"quantization": noise}, *rest, **more)

    monkeypatch.setattr(Program, "__init__", noisier)
    assert Program.load(boxes, runtime="openvino").choice.sqnr_db == pytest.approx(26, abs=0.1)


class Labels(nn.Module):
    """A label from 1000 on for each of many pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1) + 1000


def relabelled(count: int) -> Change:
    """Let the first labels be the next ones."""

    def change(outputs: list[Array]) -> list[Array]:
        outputs[0].reshape(-1)[:count] += 1
        return outputs

    return change


def test_integers_are_counted_in_another_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "labels.onnx"
    export(Labels(), path, example_inputs=torch.rand(1, 3, 25, 40), output_names=["labels"])
    with monkeypatch.context() as patch:
        change_openvino(patch, relabelled(1))
        with pytest.raises(
            ProgramError, match=r"labels in OpenVINO differs .*, in 1 of 1000 elements, .* must be equal"
        ):
            Program.load(path, runtime="openvino")
    monkeypatch.setattr(Program, "precision", property(lambda self: "int8"))
    with monkeypatch.context() as patch:
        change_openvino(patch, relabelled(10))
        assert Program.load(path, runtime="openvino").choice.parity["labels"].differing == 10
    change_openvino(monkeypatch, relabelled(20))
    with pytest.raises(
        ProgramError, match=r"in 20 of 1000 elements, .* int8 programs may differ in 1% of their integers"
    ):
        Program.load(path, runtime="openvino")
    opened = Program.__init__

    def noisier(self: Program, path: Path, session: Any, metadata: dict[str, Any], *rest: Any, **more: Any) -> None:
        noise = {"against_float": {"outputs": {"labels": recorded}}}
        opened(self, path, session, metadata | {"quantization": noise}, *rest, **more)

    monkeypatch.setattr(Program, "__init__", noisier)
    recorded: dict[str, float] = {"sqnr_db": 25.0, "integers": 50, "differing": 1}
    assert Program.load(path, runtime="openvino").choice.parity["labels"].differing == 20
    recorded = {"sqnr_db": -20.0}  # of a program from before integers were counted
    assert Program.load(path, runtime="openvino").choice.parity["labels"].differing == 20


def test_inputs_are_drawn_in_the_ranges_of_the_examples_without_their_values(tags: Path) -> None:
    program = Program.load(tags)
    first, *others = other_runtime.drawn(program)
    assert first[0].shape == first[1].shape == (3, 6)
    assert [call[0].shape for call in others] == [(1, 1), (2, 5)], "the other sizes that it was compared in"
    again = other_runtime.drawn(program)[0]
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert 3 <= first[0].min() < first[0].max() <= 10
    assert 0 <= first[1].min() < first[1].max() <= 1
    assert all(set(one) == {"shape", "low", "high"} for call in program.metadata["probe"] for one in call)
    assert Program.load(tags, runtime="openvino").choice.sqnr_db is not None


@pytest.mark.parametrize(
    "wrong",
    [
        "text", [["text"]], [[{"shape": [3, 6], "low": 0, "high": 1}]], [[{"shape": [3], "low": 0, "high": 1}] * 2],
        [[{"shape": [1 << 20, 1 << 20], "low": 0, "high": 1}] * 2], [[{"shape": [3, 6], "low": 0, "high": math.inf}] * 2],
        [[{"shape": [3, -6], "low": 0, "high": 1}] * 2], [[{"shape": [3, 6], "low": 5, "high": 1}] * 2],
        [[{"shape": [0, 6], "low": 0, "high": 1}] * 2],
    ],
    ids=str,
)  # fmt: skip
def test_a_description_of_other_inputs_is_refused(tags: Path, wrong: Any) -> None:
    program = Program.load(tags)
    program.metadata["probe"] = wrong
    with pytest.raises(ProgramError, match=r"describes a probe that its inputs do not take .*: export it again"):
        other_runtime.drawn(program)


def test_inputs_are_bounded_together(tags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program.load(tags)
    program.metadata["probe"] = [[{"shape": [3, 6], "low": 0, "high": 1}] * 2] * 3
    monkeypatch.setattr(other_runtime, "LARGEST_PROBE", 3 * 2 * 18)
    assert len(other_runtime.drawn(program)) == 3
    assert len(other_runtime.described_probe([[torch.zeros(3 * 2 * 18)]])) == 1
    monkeypatch.setattr(other_runtime, "LARGEST_PROBE", 3 * 2 * 18 - 1)
    with pytest.raises(ProgramError, match="describes a probe that its inputs do not take"):
        other_runtime.drawn(program)
    assert other_runtime.described_probe([[torch.zeros(3 * 2 * 18)]]) == []


def test_older_programs_and_those_from_elsewhere_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporting, "described_probe", lambda batches: [])
    path = tmp_path / "old.onnx"
    export(nn.Linear(2, 2), path, example_inputs=torch.rand(2, 2))
    found = Program.load(path, runtime="openvino")
    assert "old.onnx does not say what inputs it takes" in caplog.text
    assert found.choice.summary("openvino").startswith("It runs in OpenVINO, not compared with ONNX Runtime")
    with pytest.raises(ProgramError, match="nothing can be timed: name the runtime, or export it again"):
        Program.load(path, runtime="fastest")


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ("torch", "is of format onnx, which torch does not run: take onnxruntime, openvino, openvino-bf16"),
        ("tensorrt", "runs in 'tensorrt', which this arclight does not know: there are onnxruntime"),
    ],
)
def test_runtimes_that_cannot_take_a_program_are_refused_first(
    boxes: Path, runtime: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_runtime, "drawn", lambda program: pytest.fail("the other runtime was opened before"))
    with pytest.raises(ProgramError, match=said):
        Program.load(boxes, runtime=runtime)


# -- the fastest


class Clock:
    """Seconds that pass only as programs compute: ``cost_s`` by runtime."""

    def __init__(self, cost_s: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, dict.fromkeys(cost_s, 0)
        original = Program.__call__

        def call(program: Program, *inputs: Any) -> Any:
            self.now += cost_s[program.runtime]
            self.calls[program.runtime] += 1
            return original(program, *inputs)

        monkeypatch.setattr(Program, "__call__", call)
        monkeypatch.setattr(other_runtime.time, "perf_counter", self.read)

    def read(self) -> float:
        return self.now


@pytest.mark.parametrize("fastest", ["onnxruntime", "openvino"])
def test_the_fastest_runtime_is_taken_and_the_times_are_reported(
    boxes: Path, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({"onnxruntime": 0.003, "openvino": 0.003} | {fastest: 0.001}, monkeypatch)
    found = Program.load(boxes, runtime="fastest")
    other = "openvino" if fastest == "onnxruntime" else "onnxruntime"
    assert found.runtime == fastest
    assert found.choice.wall_ms == pytest.approx({fastest: 1.0, other: 3.0})
    assert (found.choice.sqnr_db is None) == (fastest == "onnxruntime")
    assert found.choice.summary(found.runtime).endswith(
        {"onnxruntime": "It runs in ONNX Runtime; measured: ONNX Runtime 1 ms, OpenVINO 3 ms."}.get(
            fastest, "; measured: OpenVINO 1 ms, ONNX Runtime 3 ms."
        )
    )
    assert clock.calls["openvino"] <= 1 + other_runtime.WARM_UP + other_runtime.ROUNDS


def test_timing_ends_within_its_budget(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"onnxruntime": 0.9, "openvino": 0.9}, monkeypatch)
    Program.load(boxes, runtime="fastest")
    rounds = 2  # each takes 1.8 seconds
    assert clock.calls == dict.fromkeys(("onnxruntime", "openvino"), 1 + other_runtime.WARM_UP + rounds)


def test_a_runtime_that_computes_something_else_is_left_out_of_what_is_timed(
    boxes: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change_openvino(monkeypatch, noisy)
    Clock({"onnxruntime": 0.003, "openvino": 0.001}, monkeypatch)
    found = Program.load(boxes, runtime="fastest")
    assert found.runtime == "onnxruntime"
    assert list(found.choice.wall_ms) == ["onnxruntime"]
    assert "OpenVINO is not timed: " in caplog.text


def test_only_runtimes_of_the_format_are_timed(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "RUNTIMES", {"onnx": frozenset({"onnxruntime"})})
    assert list(Program.load(boxes, runtime="fastest").choice.wall_ms) == ["onnxruntime"]
