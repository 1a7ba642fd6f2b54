"""Modules written as ONNX compute what they compute here."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import arclight as al


class Two(al.Module):
    """Two inputs of different widths, and dropout that an export must leave as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(3, 2), nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.drop(self.left(x) + self.right(y))


def run(model: str | bytes, *inputs: torch.Tensor) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})[0]


def test_a_path_holds_the_model_whose_parts_stay_in_their_modes(tmp_path: Path) -> None:
    model, sample = Two().train(), (torch.randn(2, 3), torch.randn(2, 4))
    model.drop.eval()
    expected = model(*sample).detach().numpy()
    model.to_onnx(tmp_path / "model.onnx", sample)
    assert model.training
    assert not model.drop.training
    np.testing.assert_allclose(run(str(tmp_path / "model.onnx"), *sample), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_file_holds_the_same_model() -> None:
    model, sample = Two().eval(), (torch.randn(2, 3), torch.randn(2, 4))
    expected = model(*sample).detach().numpy()
    model.example_input_array = {"x": sample[0], "y": sample[1]}
    file = BytesIO()
    program = model.to_onnx(file)
    assert isinstance(program, torch.onnx.ONNXProgram)
    np.testing.assert_allclose(run(file.getvalue(), *sample), expected, rtol=1e-5, atol=1e-6)


def test_without_a_sample_the_error_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"neither `input_sample` nor `model.example_input_array` attribute is set"):
        Two().to_onnx()


def test_torchscript_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"Use to_onnx\(\)"):
        Two().to_torchscript()
