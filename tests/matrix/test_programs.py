"""Every task as a program: one contract for all of them, on a diagonal of tasks and formats."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.text.test_heads import sequences, tokens
from tests.text.test_language_program import TEXT
from tests.text.test_language_program import model as language_model
from tests.vision.test_tasks import CASES, built
from torch import nn

import arclight as al
from arclight.deploy import ExportError, Int8, Program, QuantizeError
from arclight.deploy.capture import as_inputs, as_outputs, frozen_copy
from arclight.deploy.deployment import Deployment, configured, ship
from arclight.deploy.formats import export as exporting
from arclight.deploy.parity import compare
from arclight.deploy.programs.fresh import FreshRun
from arclight.fabric.signing import SigningKey
from arclight.text import ByteTokenizer
from arclight.text.language_program import of_texts

LEAST_DB = {"int8": 12.0, "float": 70.0}
"""Against the float model. Networks that learned nothing have outputs without structure, so few decibels are left of int8."""


class Own(al.Module):
    """A module of one's own: a network, its data and a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(4, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
        )

    def configure_deployment(self, data: Any, batches: int) -> Deployment:
        images = torch.rand(8, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            labels = self.model(images).argmax(1)
        return Deployment(
            model=self.model, example_inputs=images[:3], calibration=[images], input_names=["images"], output_names=["logits"],
            metric=lambda network: float((network(images).argmax(1) == labels).float().mean()), metadata={"task": "own"},
        )  # fmt: skip


def vision(name: str) -> Callable[[Path], Deployment]:
    def make(root: Path) -> Deployment:
        module, data = built(CASES[name].settings(root, CASES[name].draw(root / "set")))
        return configured(module, data)

    return make


def language(root: Path) -> Deployment:
    return of_texts(language_model(kv_heads=2, hidden=96), [TEXT], ByteTokenizer())


def head(task: Callable[[Path], Any]) -> Callable[[Path], Deployment]:
    def make(root: Path) -> Deployment:
        root.mkdir(parents=True, exist_ok=True)
        module, data = task(root).build()
        return dataclasses.replace(configured(module, data), metric=lambda network: 1.0)

    return make


TASKS: dict[str, Callable[[Path], Deployment]] = {
    **{name: vision(name) for name in CASES},
    "language": language,
    "sequence-classification": head(sequences),
    "token-classification": head(tokens),
    "own": lambda root: configured(Own()),
}


@dataclass(frozen=True)
class Cell:
    """A task in a format, in float or int8; the refusal of what there is not."""

    task: str
    format: Any
    precision: str
    refused: str = ""

    @property
    def name(self) -> str:
        return f"{self.task}-{self.format}-{self.precision}"


def refusal(task: str, form: str, precision: str) -> str:
    if (form, precision) == ("pt2", "int8"):
        return "does not run pt2|there is no int8 pt2"
    if (task, form, precision) == ("language", "aoti", "int8"):
        return "fixed shapes only"
    return ""


CELLS = [
    Cell(task, form, precision, refusal(task, form, precision))
    for task in TASKS
    for form in ("onnx", "openvino", "pt2", "aoti")
    for precision in ("float", "int8")
]
DIAGONAL = {
    "detection-openvino-int8", "segmentation-onnx-float", "pose-openvino-float", "corners-onnx-float", "obb-pt2-float",
    "classification-onnx-int8", "language-onnx-int8", "sequence-classification-onnx-float", "token-classification-openvino-float",
    "own-onnx-int8", "own-pt2-int8",
}  # fmt: skip
"""A diagonal: each task once, each format that takes seconds, and a refusal."""
FRESH = "own-onnx-int8"
"""The cell whose program runs in a process of its own, as in every export; the others' do in this one."""


def as_read(processing: Any) -> Any:
    """The fields of a processing as JSON has them, which knows no tuples."""
    return json.loads(json.dumps(dataclasses.asdict(processing)))


def in_this_process(program: Program, calls: Sequence[Sequence[np.ndarray[Any, Any]]]) -> FreshRun:
    given = []
    for call in calls:
        outputs = program(*call)
        given.append(list(outputs) if isinstance(outputs, tuple) else [outputs])
    return FreshRun(outputs=given, load_s=0.0, peak_bytes=0)


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployment]:
    """Make each task once; what it calibrates on can be read again."""
    made: dict[str, Deployment] = {}

    def of(task: str) -> Deployment:
        if task not in made:
            one = TASKS[task](tmp_path_factory.mktemp(task))
            made[task] = dataclasses.replace(one, calibration=list(one.calibration))
        return made[task]

    return of


@pytest.fixture
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    cell: Cell = request.param
    if cell.format == "aoti" and not shutil.which("g++") and not shutil.which("clang++"):
        pytest.skip("AOTInductor compiles C++, and there is neither g++ nor clang++")
    monkeypatch.setattr(exporting, "TIMED_ROUNDS", 2)
    if cell.name != FRESH:
        monkeypatch.setattr(exporting, "run_fresh", in_this_process)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cell
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "quick",
    [pytest.param(cell, id=cell.name) for cell in CELLS if cell.name in DIAGONAL],
    indirect=True,
)
def test_a_task_is_a_program(quick: Cell, deployments: Callable[[str], Deployment], tmp_path: Path) -> None:
    cell, deployment = quick, deployments(quick.task)
    recipe = Int8(calibration_batches=1) if cell.precision == "int8" else None
    fixed = 2 if (cell.format, cell.precision) == ("aoti", "int8") and deployment.dynamic is None else None
    key = SigningKey.make(tmp_path / "key.pem") if cell.format in ("pt2", "aoti") else None
    how = {
        "format": cell.format,
        "sign": key,
        "batch_size": fixed,
        "max_drop": 1.0 if recipe and deployment.metric else None,
    }
    if cell.refused:
        with pytest.raises((ExportError, QuantizeError), match=cell.refused):
            ship(deployment, tmp_path / "program", recipe, **how)
        assert not (tmp_path / "program").exists()
        return
    written = ship(deployment, tmp_path / "program", recipe, **how)
    program = Program.load(written.path, trusted=[key.public] if key else None)
    described = program.metadata

    # it says what it is of
    assert program.format == cell.format
    assert {**described, **deployment.metadata} == described
    if deployment.output_names is not None:
        assert [spec.name for spec in program.outputs] == list(deployment.output_names)
    if deployment.processing is not None:
        assert type(program.processing) is type(deployment.processing)
        assert as_read(program.processing) == as_read(deployment.processing)

    # it computes what the model does, output by output
    model = frozen_copy(deployment.model)
    inputs = as_inputs(deployment.example_inputs)
    inputs = inputs if fixed is None else tuple(value[:fixed] for value in inputs)
    with torch.no_grad():
        expected = as_outputs(model(*inputs))
    parts = (deployment.quantized_parts if recipe else None) or deployment.parts
    for name, parity in compare(expected, as_outputs(program(*inputs)), parts).items():
        assert parity.sqnr_db > LEAST_DB[cell.precision], (name, parity)

    # kernels are named, and integers counted
    assert sum(program.kernels().values()) > 0
    if recipe is None:
        assert program.precision == "fp32"
        assert "quantization" not in described
        return
    report = described["quantization"]
    assert program.precision == "int8"
    assert sum(report["integer_kernels"].values()) >= 0.9 * report["quantized_layers"] > 0
    assert {"low", "high", "over_fp32"} <= report["speed"].keys()
    if deployment.metric is not None:  # carried, and the program's own
        assert report["metric"]["program"] == pytest.approx(deployment.metric(program), abs=1e-6)
        assert report["metric"]["float"] == pytest.approx(deployment.metric(model), abs=1e-6)


def test_every_task_and_format_is_in_the_diagonal() -> None:
    names = {cell.name: cell for cell in CELLS}
    assert names.keys() >= DIAGONAL
    assert {names[name].task for name in DIAGONAL} == set(TASKS)
    assert {names[name].format for name in DIAGONAL} >= {"onnx", "openvino", "pt2"}
