"""Two networks side by side: distances by output and sample, costs, bounds, and what cannot be compared."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arclight.deploy import Program, compare, comparison, export
from arclight.deploy.comparison import Comparison, Evaluation, NamedInputs
from arclight.deploy.errors import ComparisonError
from arclight.deploy.parity import compare as compare_outputs


class Net(nn.Module):
    """Two outputs of very different sizes, and a shift of each."""

    def __init__(self, shift: float = 0.0, spoiled: bool = False) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.tensor(1000.0 + shift))
        self.small = nn.Parameter(torch.tensor(0.5 + shift))
        self.spoiled = spoiled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        small = x.mean(1) * self.small
        return x * self.large, small / (x.sum(1) > 3) if self.spoiled else small


BATCHES = [torch.full((2, 4), 0.25), torch.tensor([[0.25] * 4, [1.0] * 4])]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.9)).double()


@pytest.fixture(scope="module")
def program(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Program:
    path = tmp_path_factory.mktemp("programs") / "any.onnx"
    return export(model, path, example_inputs=torch.rand(2, 4), output_names=["odds"], metadata={"task": "tags"})


def other(program: Program, **changes: Any) -> Program:
    """A program that says something else of itself."""
    changed = copy.copy(program)
    vars(changed).update(changes)
    return changed


def quick(a: Any, b: Any, samples: Any = tuple(BATCHES), **options: Any) -> Comparison:
    return compare(a, b, samples, rounds=2, **options)


def test_a_small_output_is_not_hidden_by_a_large_one_and_the_worst_sample_is_named() -> None:
    shifted = Net()
    with torch.no_grad():
        shifted.small += 0.05  # a tenth: 20 dB
    named = [NamedInputs(["one", "two"], BATCHES[0]), NamedInputs(["three", "four"], BATCHES[1])]
    found = quick(Net(), shifted, named)
    assert found.outputs["0"].sqnr_db == math.inf
    assert found.outputs["1"].sqnr_db == pytest.approx(20, abs=1e-3)
    assert {one.name for one in found.worst} == {"one", "two", "three", "four"}
    assert {one.output for one in found.worst} == {"1"}
    assert found.samples == 4
    assert (found.size, found.nbytes) == (1.0, (8, 8))
    numbers = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert numbers["outputs"]["0"]["sqnr_db"] is None
    assert "output 1: 20.0 dB" in str(found)


def test_both_parts_of_complex_outputs_are_compared() -> None:
    one = torch.tensor([1 + 1j, 2 - 2j])
    found = compare_outputs([one], [one + 0.5j])["0"]
    assert (found.max_difference, found.largest) == (0.5, 2.0)
    assert found.sqnr_db == pytest.approx(10 * math.log10(10 / 0.5))


def test_samples_add_up_to_the_ratio_of_all() -> None:
    """Against the definition, over all values at once."""
    torch.manual_seed(0)
    a, b = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    found = quick(a, b, [x[:2], x[2:]])
    with torch.no_grad():
        one, other = (net.float()(x.float()).double() for net in (a, b))
    expected = 10 * torch.log10(one.square().sum() / (other - one).square().sum())
    assert found.outputs["0"].sqnr_db == pytest.approx(float(expected), abs=1e-6)


def test_each_bound_has_its_sentence() -> None:
    scores = {True: {"accuracy": 0.9, "class cat": 0.8}, False: {"accuracy": 0.7, "class cat": 0.9}}

    def scored(network: Any) -> dict[str, float]:
        return scores[float(network(BATCHES[0])[0][0, 0]) == 250]

    a, b = Net(), Net(shift=0.25)
    found = quick(
        a, b, scores=scored, classes=["class cat"], max_drop=0.1, min_sqnr_db=30, max_latency=1e-9, max_size=0.5
    )  # fmt: skip
    drop, noise, time, size = found.exceeded
    assert drop == "B is lower by 0.2000 in accuracy: more than max_drop 0.1"
    assert noise.startswith("output 1 of B has 6.0 dB of A's: less than min_sqnr_db 30")
    assert "more than max_latency 1e-09" in time
    assert size == "B has 1.00 times the size of A: more than max_size 0.5"
    wide = {"max_drop": 0.21, "min_sqnr_db": 5, "max_latency": 1e9, "max_size": 1.0}
    assert quick(a, b, scores=scored, **wide).exceeded == ()
    assert quick(a, b, scores=scored, metric="class cat", max_drop=0).exceeded == ()
    assert quick(a, b, scores=lambda network: math.nan, max_drop=1).exceeded, "a score of NaN is within no bound"
    with pytest.raises(ComparisonError, match="no score 'recall'; there are accuracy, class cat"):
        quick(a, b, scores=scored, metric="recall")
    with pytest.raises(ComparisonError, match="max_size bounds a size"):
        quick(a, b.forward, max_size=1)
    for bound in ({"max_drop": -1.0}, {"min_sqnr_db": math.nan}, {"max_latency": math.inf}):
        with pytest.raises(ComparisonError, match="must be a finite number"):
            quick(a, b, scores=scored, **bound)
    with pytest.raises(ComparisonError, match="gives no metric"):
        quick(a, b, max_drop=0.1)


def test_incomparable_outputs_are_named(program: Program) -> None:
    named = [NamedInputs(["first", "dark", "x", "y"], torch.cat(BATCHES))]
    with pytest.raises(ComparisonError, match="first: output 1 is NaN or infinite in other places"):
        quick(Net(), Net(spoiled=True), named)
    with pytest.raises(ComparisonError, match="output 0 of B is NaN in 4 of 4 values for sample 0"):
        quick(Net(), lambda x: (x * math.nan, x.mean(1)))
    with pytest.raises(ComparisonError, match=r"output 0 of A has shape \(2, 4\), of B \(2, 3\)"):
        quick(Net(), lambda x: (x[:, :3], x.mean(1)))
    with pytest.raises(ComparisonError, match=r"of A has shape .*, of B none"):
        quick(Net(), lambda x: x)
    with pytest.raises(ComparisonError, match=r"output 2 of A has shape none, of B \(2,\)"):
        quick(Net(), lambda x: (*Net()(x), x.sum(1)))
    with pytest.raises(ComparisonError, match="no sample to compare on"):
        quick(Net(), Net(), [])
    with pytest.raises(ComparisonError, match="2 samples has 1 names"):
        quick(Net(), Net(), [NamedInputs(["one"], BATCHES[0])])
    with pytest.raises(ComparisonError, match="A is scored by a, and B by b"):
        names = iter("ab")
        quick(Net(), Net(), scores=lambda network: {next(names): 1.0})
    (first,) = program.inputs
    narrow = other(program, inputs=(replace(first, shape=("batch", 3)),))
    taller = other(program, outputs=(replace(program.outputs[0], shape=("batch", 5)),))
    with pytest.raises(ComparisonError, match=r"takes input.* and .* takes input.*compare programs of the same inputs"):
        quick(narrow, program)
    with pytest.raises(ComparisonError, match="compare programs of the same outputs"):
        quick(program, taller)
    with pytest.raises(ComparisonError, match=r"is a program of the task 'tags', .* of 'names'"):
        quick(program, other(program, metadata={"task": "names"}))
    with pytest.raises(ComparisonError, match="A: the program expects input"):
        quick(program, nn.Linear(3, 2), [torch.rand(2, 3)])


def test_a_program_of_one_batch_size_is_called_as_often_as_it_must_be(model: nn.Module, tmp_path: Path) -> None:
    fixed = export(
        model, tmp_path / "fixed.onnx", example_inputs=torch.rand(3, 4), dynamic_batch=False, output_names=["odds"]
    )
    samples = [torch.rand(2, 4), torch.rand(7, 4)]
    with torch.no_grad():
        expected = float(copy.deepcopy(model).float().eval()(samples[1]).sum())
    found = quick(model, fixed, samples, scores=lambda network: float(network(samples[1]).sum()))
    assert found.samples == 9
    assert found.outputs["odds"].sqnr_db > 100
    assert found.scores["metric"] == pytest.approx((expected, expected), rel=1e-5)
    assert found.batch == 3


def test_only_the_first_samples_are_read() -> None:
    read: list[int] = []

    def batches() -> Any:
        for number in range(5):
            read.append(number)
            yield torch.rand(2, 4)

    samples = Evaluation(samples=batches()).first(3).samples
    assert quick(Net(), Net(), samples).samples == 3
    assert read == [0, 1]


def test_a_model_in_double_precision_beside_its_program_stays_as_it_is(model: nn.Module, program: Program) -> None:
    model.train()
    found = quick(model, program, [torch.rand(3, 4, dtype=torch.float64)])  # both take it in float32
    assert found.outputs["odds"].sqnr_db > 100
    assert model.training
    assert model[0].weight.dtype == torch.float64
    assert model[0].weight.requires_grad


def test_a_model_on_a_gpu_is_timed_as_a_copy_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []
    original = comparison.benchmark

    def noted(calls: Any, *given: Any, **options: Any) -> Any:
        timed.extend(calls.values())
        return original(calls, *given, **options)

    monkeypatch.setattr(comparison, "benchmark", noted)
    a, b = Net(), Net()
    quick(a, b)
    assert timed == [a, b]
    monkeypatch.setattr(comparison, "_is_on_cuda", lambda model: model is a)
    quick(a, b)
    assert timed[2] is not a
    assert timed[3] is b
