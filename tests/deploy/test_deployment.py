"""What is taken of a Module that does not say what it ships: its example, whole, or a batch of its training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.deploy import ExportError
from arclight.deploy.deployment import configured, ship


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
def test_an_example_that_is_none_is_refused(example: Any) -> None:
    module = Masked()
    module.example_input_array = example
    with pytest.raises(ExportError, match="example_input_array"):
        configured(module)
