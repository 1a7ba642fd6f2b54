"""A model that cannot be captured or converted is refused with the operator, the module, the line and a way out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from arclight.deploy import export, prepare_qat, quantize
from arclight.deploy.errors import ExportError
from arclight.deploy.settings import DynamicInt8

TORCHS = (
    "\x1b",
    "TORCH_LOGS",
    "TORCHDYNAMO",
    "http",
    "draft_export",
    "PyTorch",
    "mark_dynamic",
    "guard_or_false",
    "\n",
)
"""What is advice for users of torch's exporters, and no help here."""


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # here
            return x * 2
        return x


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(int(x.abs().sum() + 1)).mean()  # here


class Array(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()) * 2  # here


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])  # here
        return x.reshape(rows, 4)


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(3, 4)  # here


class Short(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 30 else x  # here


class Eigenvalues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eig(x).eigenvalues.real  # here


def within(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), module))


def place(module: nn.Module) -> str:
    """Return the module's name in `within`, and the line that is marked."""
    lines, first = inspect.getsourcelines(type(module))
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    return f"in module '1.1' ({type(module).__name__}) at {__file__}:{line}"


@pytest.mark.parametrize(
    ("module", "operator", "way_out"),
    [
        (Branch(), "torch.Tensor.__bool__", "torch.where"),
        (Cut(), "torch.Tensor.__int__", "let the caller decide outside of the model"),
        (Array(), "torch.Tensor.numpy", "write it with torch's operators alone"),
        (Fixed(), "SymInt.__int__", "dynamic_batch=False"),
        (Table(), "torch.Tensor.add", "dynamic_batch=False"),
        (Short(), "SymBool.__bool__", "dynamic_batch=False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_capture_failures_name_the_operator_and_its_place(
    module: nn.Module, operator: str, way_out: str, tmp_path: Path
) -> None:  # fmt: skip
    with pytest.raises(ExportError, match=r"torch\.export cannot capture the model: ") as caught:
        export(within(module), tmp_path / "p.onnx", example_inputs=torch.rand(3, 4))
    said = str(caught.value)
    assert f"{operator} {place(module)}" in said
    assert way_out in said
    assert not [words for words in TORCHS if words in said]


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_conversion_failures_name_the_operator_and_its_place(form: str, tmp_path: Path) -> None:
    module = Eigenvalues()
    with pytest.raises(ExportError, match="the model cannot be written as ONNX: ") as caught:
        export(within(module), tmp_path / "p", example_inputs=torch.rand(3, 4, 4), format=form)  # type: ignore[arg-type]
    said = str(caught.value)
    assert f"aten.linalg_eig {place(module)}" in said
    assert "No ONNX function found" in said
    assert "format='pt2'" in said
    assert not [words for words in TORCHS if words in said]


def test_quantization_and_training_name_the_place_too() -> None:
    module, x = Branch(), torch.rand(3, 4)
    for refused in (
        lambda: quantize(within(module), recipe=DynamicInt8(), example=x),
        lambda: prepare_qat(within(module), x),
    ):
        with pytest.raises(ExportError, match=re.escape(f"torch.Tensor.__bool__ {place(module)}")):
            refused()


def test_the_model_itself_is_named_where_it_has_no_layers(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"torch.Tensor.__bool__ in the model itself \(Branch\) at .*test_failures.py"
    ):
        export(Branch(), tmp_path / "p.onnx", example_inputs=torch.rand(3, 4))
