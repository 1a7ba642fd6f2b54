"""Example inputs of Modules that declare none: example_input_array, or a batch of training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.deploy import DynamicInt8, ExportError, Int8, LowBit, QuantizeError, WeightOnly, quantize
from arclight.deploy.deployment import Deployment, configured, ship
from arclight.deploy.settings import Target


class Batches(al.DataModule):
    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return self.batches


class Masked(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x) if mask is None else self.layer(x * mask)


class Scaled(Masked):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x) * scale


class Joined(Masked):
    def forward(self, *parts: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(sum(parts[1:], parts[0]))


X = torch.arange(20.0).reshape(5, 4)


@pytest.mark.parametrize(
    "example",
    [{"x": X, "mask": X > 3}, *(pytest.param(one, marks=pytest.mark.slow) for one in ((X, X > 3), [X, X > 3]))],
)
def test_every_input_of_an_example_is_shipped(example: Any, tmp_path: Path) -> None:
    module = Masked()
    module.example_input_array = example
    program = ship(configured(module), tmp_path / "p.onnx")
    assert [spec.name for spec in program.inputs] == ["x", "mask"]
    torch.testing.assert_close(program(X, X > 9), module(X, X > 9).detach())


def test_calibration_takes_as_many_inputs_as_the_example_has() -> None:
    module = Masked()
    module.example_input_array = (X, X > 3)
    deployment = configured(module, Batches([(X, X > 5, torch.zeros(5))]))
    assert [len(batch) for batch in deployment.calibration] == [2]
    module.example_input_array = X
    deployment = configured(module, Batches([(X, torch.zeros(5))]))
    assert [len(batch) for batch in deployment.calibration] == [1]


def test_a_scalar_of_a_batch_stays_one() -> None:
    deployment = configured(Scaled(), Batches([(X, torch.tensor(2.0))]))
    assert [tuple(value.shape) for value in deployment.example_inputs] == [(3, 4), ()]


def test_networks_of_any_number_of_inputs_take_those_of_the_example() -> None:
    module = Joined()
    with pytest.raises(ExportError, match=r"any number of inputs \(\*parts\).*set example_input_array"):
        configured(module, Batches([(X, X)]))
    module.example_input_array = (X, X)
    assert len(configured(module).example_inputs) == 2


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (None, "does not say what it takes"),
        ([], "does not say what it takes"),
        ({"a": [X]}, "gives several loaders"),
        ([DataLoader([X]), DataLoader([X])], "gives several loaders"),
        ([{"y": X}], "the network takes x, and a batch holds y"),
        (["text"], "cannot be taken from a batch"),
    ],
)
def test_data_without_inputs_are_refused_by_name(batches: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        configured(Masked(), Batches(batches))


@pytest.mark.parametrize("example", [{"mask": X}, {"z": X}, 5, ()])
def test_an_invalid_example_input_array_is_refused(example: Any) -> None:
    module = Masked()
    module.example_input_array = example
    with pytest.raises(ExportError, match="example_input_array"):
        configured(module)


def convolutions() -> Deployment:
    """A network with integer layers in every runtime, whose calibration batches can be read once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.SiLU(), nn.Conv2d(16, 8, 1))
    images = torch.rand(8, 4, 16, 16)
    return Deployment(model=model, example_inputs=images[:3], calibration=iter([images]))


def test_several_formats_are_each_quantized_for_what_runs_them(tmp_path: Path) -> None:
    found = ship(convolutions(), tmp_path / "p", Int8(calibration_batches=1), format=["onnx", "openvino"])
    targets = {form: program.metadata["quantization"]["target"] for form, program in found.items()}
    assert targets == {"onnx": "onnxruntime", "openvino": "openvino"}
    assert [program.path for program in found.values()] == [tmp_path / "p" / "onnx", tmp_path / "p" / "openvino"]


def test_the_fastest_of_a_recipe_is_looked_for_in_every_placement(tmp_path: Path) -> None:
    program = ship(convolutions(), tmp_path / "p", Int8(calibration_batches=1), format="fastest")
    times = program.metadata["fastest"]["wall_ms"]
    assert set(times) == {"onnx", "openvino"}
    assert times[program.format] == min(times.values())
    targets = {"onnx": "onnxruntime", "openvino": "openvino"}
    assert program.metadata["quantization"]["target"] == targets[program.format]


def test_a_folder_of_int8_is_of_openvino(tmp_path: Path) -> None:
    program = ship(convolutions(), tmp_path / "p", Int8(calibration_batches=1))
    assert (program.format, program.metadata["quantization"]["target"]) == ("openvino", "openvino")


def test_formats_that_do_not_hold_a_recipe_are_no_candidates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Masked()
    module.layer = nn.Linear(32, 32)
    deployment = Deployment(model=module, example_inputs=torch.randn(3, 32))
    program = ship(deployment, tmp_path / "p", DynamicInt8(), format="fastest")
    assert (program.format, list(program.metadata["fastest"]["wall_ms"])) == ("onnx", ["onnx"])
    assert "format openvino is not timed: there is no dynamic int8 program" in caplog.text
    assert "OpenVINO has no kernel" in program.metadata["fastest"]["left_out"]["openvino"]
    with pytest.raises(ExportError, match=r"no w4a8 program of format openvino: .* take WeightOnly\(bits=4\)"):
        ship(deployment, tmp_path / "q", LowBit(), format="fastest", candidates=["openvino"])


def test_weights_in_groups_are_written_for_both_runtimes(tmp_path: Path) -> None:
    module = Masked()
    module.layer = nn.Linear(32, 32)
    deployment = Deployment(model=module, example_inputs=torch.randn(3, 32))
    programs = ship(deployment, tmp_path / "p", WeightOnly(), format=["onnx", "openvino"])
    targets = {form: program.metadata["quantization"]["target"] for form, program in programs.items()}
    assert targets == {"onnx": "onnxruntime", "openvino": "openvino"}


def test_a_target_that_loses_too_much_is_left_out_of_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*arguments: Any, target: Target | None, **options: Any) -> Any:
        if target == "openvino":
            raise QuantizeError("it loses 3 points")
        return quantize(*arguments, target=target, **options)

    monkeypatch.setattr("arclight.deploy.deployment.quantize", refusing)
    program = ship(convolutions(), tmp_path / "p", Int8(calibration_batches=1), format="fastest")
    assert program.format == "onnx"
    assert program.metadata["fastest"]["left_out"] == {"openvino": "it loses 3 points"}
    with pytest.raises(QuantizeError, match="loses 3 points"):
        ship(convolutions(), tmp_path / "q", Int8(calibration_batches=1), format=["onnx", "openvino"])
