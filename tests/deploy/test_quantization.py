"""Quantization: what becomes integers, how close it stays, and that the user's model is left alone."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from tests.deploy import executorch_site
from tests.exports import compare_here
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from arclight.deploy import (
    DynamicInt8,
    ExportError,
    Int8,
    Program,
    QuantizedModel,
    QuantizeError,
    convert,
    export,
    prepare_qat,
    quantize,
)
from arclight.deploy.programs import processor
from arclight.deploy.settings import Target


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=3)  # those of the fixtures are compared in a fresh one


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    a, b = reference.double().numpy(), other.double().numpy()
    return float(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))


def small(**changes: nn.Module) -> nn.Sequential:
    """Convolutions enough to quantize, in a second."""
    layers = {
        "first": nn.Conv2d(4, 8, 3), "act": nn.SiLU(), "second": nn.Conv2d(8, 8, 3), "relu": nn.ReLU(),
        "last": nn.Conv2d(8, 4, 1),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers | changes)).eval()


def test_outputs_stay_close_at_any_batch_size(model: nn.Module, quantized: QuantizedModel, images: Tensor) -> None:
    for batch in (1, 2, 5):
        with torch.no_grad():
            assert sqnr_db(model(images[:batch]), quantized(images[:batch])) >= 30
    assert 30 <= quantized.sqnr_db <= 80


def test_every_score_stays_close(model: nn.Module, quantized: QuantizedModel, images: Tensor) -> None:
    with torch.no_grad():  # boxes in pixels would hide them in the ratio above
        assert sqnr_db(model(images)[..., 4:], quantized(images)[..., 4:]) >= 25


def test_the_stem_stays_in_float_everything_else_does_not(model: nn.Module, quantized: QuantizedModel) -> None:
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert set(quantized.float_layers) == {"stem.0"}
    assert set(quantized.quantized_layers) == convolutions - set(quantized.float_layers)


def test_the_users_model_is_untouched(images: Tensor) -> None:
    model = small()
    model.train()
    model.first.eval()
    model.last.weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    quantize(model, [torch.rand(2, 4, 16, 16)])
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert list(model.state_dict()) == list(state)


def test_skip_keeps_a_module_and_what_is_inside_in_float() -> None:
    block = nn.Sequential(OrderedDict(one=nn.Conv2d(8, 8, 3), act=nn.SiLU(), two=nn.Conv2d(8, 8, 3)))
    model = small(last=nn.Conv2d(8, 8, 1), block=block, block2=nn.Conv2d(8, 8, 1), out=nn.Conv2d(8, 4, 1))
    kept = quantize(model, [torch.rand(2, 4, 16, 16)], recipe=Int8(skip=("block", "second")))
    assert set(kept.float_layers) == {"second", "block.one", "block.two"}
    assert set(kept.quantized_layers) == {"first", "last", "block2", "out"}


def test_skip_that_names_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(QuantizeError, match="did you mean 'second'"):
        quantize(small(), [torch.rand(2, 4, 16, 16)], recipe=Int8(skip=("secnd",)))


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "no batch"),
        (torch.rand(2, 4, 16, 16), r"give \[batch\]"),
        ([torch.rand(2, 4, 16, 16), torch.full((2, 4, 16, 16), torch.nan)], "batch 1 holds NaN"),
        ([{"images": torch.rand(2, 4, 16, 16)}], "batch 0"),
        ([torch.rand(0, 4, 16, 16)], "batch 0 is empty"),
        ([torch.rand(2, 4, 16, 16), torch.rand(0, 4, 16, 16)], r"batch 1 is empty, .*\(0, 4, 16, 16\)"),
        ([torch.zeros(2, 4, 16, 16)] * 2, "input .* is 0 in every calibration batch"),
        ([torch.full((2, 4, 16, 16), 0.01)] * 2, r"input input is 0\.01 in every calibration batch"),
    ],
)
def test_calibration_data_is_checked(calibration: object, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        quantize(small(), calibration)  # type: ignore[arg-type]


def test_inputs_that_are_one_value_are_refused_where_the_stem_is_in_float(model: nn.Module) -> None:
    with pytest.raises(QuantizeError, match="input images is 0 in every calibration batch"):
        quantize(model, [torch.zeros(2, 3, 64, 64)])


def test_a_batch_of_its_own_value_each_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    batches = [torch.full((2, 4, 16, 16), value) for value in (-1.0, 0.5, 1.0)]
    quantized = quantize(small(), batches, recipe=Int8(min_sqnr_db=-100))
    assert len({quantized(batch).mean().item() for batch in batches}) == 3
    assert "calibration batch" not in caplog.text


def test_one_value_of_an_input_beside_others_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.rand(8, 3, 32, 32)
    recipe = Int8(min_sqnr_db=-100)
    quantize(Classifier().eval(), [(x, torch.full((8, 1), 0.5))], recipe=recipe)
    assert "input scale is 0.5 in every calibration batch" in caplog.text
    caplog.clear()
    quantize(Classifier().eval(), [(x, torch.rand(8, 1))], recipe=recipe)
    assert "calibration batch" not in caplog.text


@pytest.mark.parametrize("observer", ["histogram", "minmax"])
def test_layers_that_are_zero_in_calibration_are_named(
    observer: Literal["histogram", "minmax"], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = small(), torch.rand(2, 4, 16, 16)
    with torch.no_grad():
        model.first.weight.abs_().neg_()
        model.first.bias.fill_(-1)
    dead = nn.Sequential(
        OrderedDict(first=model.first, relu=nn.ReLU(), second=nn.Conv2d(8, 8, 3), last=nn.Conv2d(8, 4, 1))
    )
    recipe = Int8(observer=observer, min_sqnr_db=-100)
    quantize(dead, [batch, batch], recipe=recipe)
    assert "gave nothing but 0 on all 2 calibration batches" in caplog.text
    assert "'relu'" in caplog.text
    caplog.clear()
    quantize(dead, [batch, -4 * batch - 4], recipe=recipe)
    assert "gave nothing" not in caplog.text


class Sum(nn.Module):
    """Two branches; the second begins after the first has gone through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.other, self.end = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        late = self.other(x)
        return self.end(self.last(late + self.two(self.one(x))))


def test_of_two_branches_that_overflow_the_first_is_named() -> None:
    model = Sum()
    with torch.no_grad():
        model.other.weight.fill_(1e38)
        model.two.weight.fill_(1e38)
        model.one.weight.fill_(1.0)
    with pytest.raises(QuantizeError, match=r"makes (NaN|infinite values), first in layer 'other'"):
        quantize(model, [torch.rand(2, 4, 8, 8) * 10])


def test_inputs_without_a_common_batch_are_refused() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.last(self.hidden(x) @ table.T @ table)

    with pytest.raises(ExportError, match=r"shapes \[\(2, 8\), \(5, 8\)\]: put the batch first"):
        quantize(Lookup(), [(torch.rand(2, 8), torch.rand(5, 8))])
    with pytest.raises(ExportError, match=r"shapes \[\(2, 8\), \(5, 8\)\]: put the batch first"):
        prepare_qat(Lookup(), (torch.rand(2, 8), torch.rand(5, 8)))


def test_calibration_batches_of_other_sizes_are_refused_by_their_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    sizes = [torch.rand(2, 5, 4), torch.rand(3, 5, 4), torch.rand(2, 7, 4)]
    with pytest.raises(
        QuantizeError, match=r"batch 2 has inputs of shapes \[\(2, 7, 4\)\], .* captured on \[\(2, 5, 4\)\]"
    ):
        quantize(model, sizes)
    free = quantize(model, sizes, dynamic={"input": {0: "batch", 1: "time"}})
    assert free(sizes[2]).shape == (2, 7, 4)


def test_a_model_without_integers_is_refused() -> None:
    with pytest.raises(QuantizeError, match="no layer of Conv2d"):
        quantize(nn.Conv2d(4, 8, 3), [torch.rand(2, 4, 8, 8)])


def test_an_unfaithful_model_is_refused() -> None:
    with pytest.raises(QuantizeError, match="signal-to-noise ratio"):
        quantize(small(), [torch.rand(2, 4, 16, 16)], recipe=Int8(min_sqnr_db=90))


def test_only_as_many_batches_are_read_as_asked() -> None:
    read = []

    def batches() -> Iterator[Tensor]:
        for i in range(100):
            read.append(i)
            yield torch.rand(2, 4, 16, 16)

    assert quantize(small(), batches(), recipe=Int8(calibration_batches=3)).batches == 3
    assert len(read) <= 4


def test_ranges_come_from_the_calibration_data() -> None:
    model, narrow = small(), torch.rand(4, 4, 16, 16)
    wide = narrow * 10
    with torch.no_grad():
        right, wrong = (quantize(model, [data], recipe=Int8(min_sqnr_db=0)) for data in (wide, narrow))
        assert sqnr_db(model(wide), right(wide)) > sqnr_db(model(wide), wrong(wide)) + 10


@pytest.mark.parametrize(("reduce_range", "largest"), [(False, 127), pytest.param(True, 63, marks=pytest.mark.slow)])
def test_weights_are_rounded_per_channel(reduce_range: bool, largest: int, tmp_path: Path) -> None:
    model, batch = small(), torch.rand(4, 4, 16, 16)
    with torch.no_grad():
        model.second.weight[3] *= 100  # one scale for all channels would crush the others
    quantized = quantize(model, [batch], recipe=Int8(reduce_range=reduce_range))
    # sums of 8 bits overflow on some processors
    program = export(quantized, tmp_path / "q.onnx", example_inputs=batch, max_difference=1e3)
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(program.path).graph.initializer]
    integers = next(a for a in stored if a.dtype == np.int8 and a.shape == (8, 8, 3, 3))
    weight = model.second.weight.detach().double().numpy()
    scale = np.abs(weight).max((1, 2, 3), keepdims=True) / largest
    assert np.abs(integers).max() == largest
    assert np.array_equal(integers, np.round(weight / scale).astype(np.int8))


SEVEN_BITS: list[tuple[set[str], Target, bool]] = [
    ({"avx", "avx2"}, "onnxruntime", True),
    ({"avx", "avx2", "avx_vnni"}, "onnxruntime", False),
    ({"asimd"}, "onnxruntime", False),
    (set(), "onnxruntime", False),
    ({"avx", "avx2"}, "openvino", True),
    ({"avx", "avx2"}, "executorch", False),
]


@pytest.mark.parametrize(
    ("recipe", "present", "target", "reduced"),
    [(Int8(), *case) for case in SEVEN_BITS[:2]]
    + [pytest.param(Int8(), *case, marks=pytest.mark.slow) for case in SEVEN_BITS[2:]]
    + [
        pytest.param(DynamicInt8(min_sqnr_db=0), *case, marks=[pytest.mark.slow] if place else [])
        for place, case in enumerate(SEVEN_BITS)
        if case[1] == "onnxruntime"
    ],
)
def test_weights_have_seven_bits_where_sums_of_eight_would_overflow(
    recipe: Int8 | DynamicInt8, present: set[str], target: Target, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset(present))
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(4, 8)
    if isinstance(recipe, DynamicInt8):
        quantized = quantize(model, recipe=recipe, example=batch)
    else:
        quantized = quantize(model, [batch], recipe=recipe, target=target)
        assert prepare_qat(model, batch, target=target).recipe == quantized.recipe
    assert quantized.recipe == dataclasses.replace(recipe, reduce_range=reduced)
    largest = [int(tensor.abs().max()) for tensor in quantized.state_dict().values() if tensor.dtype == torch.int8]
    assert largest == [63 if reduced else 127] * 2


@pytest.mark.slow
def test_a_program_that_overflows_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset({"avx", "avx2"}))
    model, batch = small(), torch.rand(4, 4, 16, 16)
    eight = quantize(model, [batch], recipe=Int8(reduce_range=False))
    with pytest.raises(ExportError, match=r"no VNNI, .* quantize with reduce_range=True"):
        export(eight, tmp_path / "q.onnx", example_inputs=batch, max_difference=-1.0)
    seven = quantize(model, [batch])
    with pytest.raises(ExportError, match=r"no program was written$"):
        export(seven, tmp_path / "q.onnx", example_inputs=batch, max_difference=-1.0)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("onnxruntime", r" \(this processor has no VNNI, and its sums of 8-bit products overflow: quantize with reduce_range=True\)"),
        ("tensorrt", r" \(.* overflow, in ONNX Runtime, where programs for tensorrt are compared: quantize with reduce_range=True\)"),
        pytest.param("executorch", "", marks=executorch_site.NEEDED),  # its kernels widen before they multiply
    ],
)  # fmt: skip
def test_missing_instructions_are_blamed_only_for_targets_that_need_them(
    target: Target, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset({"avx", "avx2"}))
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(4, 8)
    eight = quantize(model, [batch], recipe=Int8(reduce_range=False), target=target)
    with pytest.raises(ExportError, match=rf"no program was written{reason}$"):
        export(eight, tmp_path / "q", example_inputs=batch, max_difference=-1.0)


@pytest.mark.slow
def test_a_nearly_dead_channel_does_not_overflow_the_bias(tmp_path: Path) -> None:
    model, batch = small(), torch.rand(4, 4, 16, 16)
    with torch.no_grad():
        model.second.weight[2] *= 1e-12
        model.second.bias[2] = 3.0
    quantized = quantize(model, [batch])
    program = export(quantized, tmp_path / "q.onnx", example_inputs=batch)
    with torch.no_grad():
        assert sqnr_db(model(batch), program(batch)) >= 30


class Sized(nn.Module):
    """Asks a tensor for its batch size, and hands another to a float operator and to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.out = nn.Linear(8 * 12 * 12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.silu(self.b(F.relu(self.a(x))))
        y = F.relu(self.c(x))
        return self.out(y.view(y.shape[0], -1)), x.softmax(1)


def test_inputs_of_float_operators_are_not_quantized(tmp_path: Path) -> None:
    batch = torch.randn(4, 4, 16, 16)
    quantized = quantize(Sized(), [batch])
    assert set(quantized.quantized_layers) == {"a", "b", "c", "out"}
    graph = onnx.load(export(quantized, tmp_path / "q.onnx", example_inputs=batch).path).graph
    producer = {output: node for node in graph.node for output in node.output}
    readers = [node for node in graph.node if node.op_type in ("Softmax", "Reshape")]
    assert {producer[node.input[0]].op_type for node in readers if node.op_type == "Softmax"} == {"Mul"}
    assert {producer[node.input[0]].op_type for node in readers if node.op_type == "Reshape"} == {"DequantizeLinear"}


class Towers(nn.Module):
    """One convolution applied to two levels with ranges of their own, as detection heads share it."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, 2, padding=1)
        self.shared, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.fine(x), self.coarse(x) * 30
        return self.last(F.relu(self.shared(a))), self.last(F.relu(self.shared(b)))


def test_a_shared_convolution_is_exact_at_each_place(tmp_path: Path) -> None:
    model, batch = Towers().eval(), torch.rand(4, 4, 16, 16)
    program = export(quantize(model, [batch]), tmp_path / "q.onnx", example_inputs=batch)
    with torch.no_grad():
        for expected, given in zip(model(batch), program(batch)):
            assert sqnr_db(expected, given) >= 30


class InPlace(nn.Module):
    """Half of the channels are clipped through a view, in place: the convolution after it reads the clipped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        F.relu(x[:, :4], inplace=True)
        return self.c(self.b(x))


def test_operations_in_place_keep_their_meaning() -> None:
    model, batch = InPlace().eval(), torch.randn(4, 4, 16, 16)
    with torch.no_grad():
        assert sqnr_db(model(batch), quantize(model, [batch])(batch)) >= 30


class TwoOutputs(nn.Module):
    """One convolution before two 1x1 convolutions that only float operators read"""

    def __init__(self, **last: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, **{"kernel_size": 1, **last})
        self.other = weight_norm(nn.Conv2d(8, 6, 1, bias=False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        return self.last(x).sigmoid(), self.other(x)


@pytest.mark.parametrize("trained", [False, True])
def test_a_last_convolution_of_one_position_is_an_integer_product(tmp_path: Path, trained: bool) -> None:
    model, batch = TwoOutputs().eval(), torch.randn(4, 4, 9, 7)
    if trained:
        prepared = prepare_qat(model, batch)
        sum(output.sum() for output in prepared(batch)).backward()
        assert prepared.last.weight.grad.shape == model.last.weight.shape
    quantized = convert(prepared.eval()) if trained else quantize(model, [batch])
    assert (quantized.quantized_layers, quantized.float_layers) == (("first", "last", "other"), ())
    program = export(quantized, tmp_path / "q.onnx", example_inputs=batch)
    assert program.metadata["quantization"]["integer_kernels"] == {"QLinearConv": 1, "MatMulIntegerToFloat": 2}
    with torch.no_grad():
        for some in (batch, batch[:1]):
            for expected, given in zip(model(some), program(some), strict=True):
                assert sqnr_db(expected, given) >= 30


def test_names_that_differ_in_a_dot_keep_their_weights_apart() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a_b, self.a = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 1), nn.Module()
            self.a.b = nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x).relu()
            return self.a_b(x), self.a.b(x)

    model, batch = Alike().eval(), torch.randn(2, 4, 8, 8)
    quantized = quantize(model, [batch])
    assert quantized.quantized_layers == ("first", "a_b", "a.b")
    with torch.no_grad():
        for expected, given in zip(model(batch), quantized(batch), strict=True):
            assert sqnr_db(expected, given) >= 30


def test_weights_of_seven_bits_are_placed_like_those_of_eight() -> None:
    """Processors without VNNI have seven by default."""
    model, batch = TwoOutputs().eval(), torch.randn(4, 4, 9, 7)
    seven, eight = (quantize(model, [batch], recipe=Int8(reduce_range=seven)) for seven in (True, False))
    assert seven.quantized_layers == eight.quantized_layers == ("first", "last", "other")


@pytest.mark.parametrize("last", [{"kernel_size": 3}, {"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_a_last_convolution_of_more_than_a_position_stays_in_float(last: dict[str, Any]) -> None:
    model, batch = TwoOutputs(**last).eval(), torch.randn(4, 4, 9, 7)
    assert quantize(model, [batch]).float_layers == ("last",)


def test_a_linear_layer_that_is_applied_twice_has_two_integer_kernels(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.last(self.a(x).relu()), self.last(self.b(x).relu())

    model, batch = Twice().eval(), torch.randn(4, 6, 8)
    program = export(quantize(model, [batch]), tmp_path / "q.onnx", example_inputs=batch)
    assert sum(program.metadata["quantization"]["integer_kernels"].values()) == 4
    onnx.checker.check_model(onnx.load(program.path), full_check=True)
    assert [tensor.name for tensor in onnx.load(program.path).graph.initializer if "last.weight" in tensor.name] == []
    with torch.no_grad():
        for expected, given in zip(model(batch[:3]), program(batch[:3]), strict=True):
            assert sqnr_db(expected, given) >= 30


def test_biases_of_dead_channels_fit_into_integers(tmp_path: Path) -> None:
    """A class that is not trained: weights of 0 and a large bias, behind small activations."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1)).eval(), torch.rand(4, 4, 9, 7)
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[0].bias.mul_(1e-3)
        model[2].weight[0], model[2].bias[0] = 0.0, 11.0
        model[2].weight[1].mul_(1e-5)
        model[2].bias[1] = -7.0
    program = export(quantize(model, [batch]), tmp_path / "q.onnx", example_inputs=batch)
    with torch.no_grad():
        expected, given = model(batch), torch.as_tensor(program(batch))
    for channel in range(3):
        assert sqnr_db(expected[:, channel], given[:, channel]) >= 40


def test_clips_are_rounded_once(tmp_path: Path) -> None:
    layers = [nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU6(), nn.Conv2d(8, 2, 1)]
    batch = torch.randn(4, 4, 16, 16)
    program = export(quantize(nn.Sequential(*layers), [batch]), tmp_path / "q.onnx", example_inputs=batch)
    graph = onnx.load(program.path).graph
    producer = {output: node.op_type for node in graph.node for output in node.output}
    rounded = [producer.get(node.input[0], "input") for node in graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(rounded) == ["Clip", "Relu", "Transpose", "input"]  # whose scale is that of the clip before it


def test_a_batch_norm_without_a_convolution_is_converted_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao looks for batch norms that its own preparation for training fuses, and traces 192 patterns for it."""

    def trace(*_: object, **__: object) -> None:
        raise AssertionError("a pattern is traced")

    monkeypatch.setattr("torchao.quantization.pt2e.qat_utils._get_aten_graph_module_for_pattern", trace)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    ).eval()
    images = torch.randn(4, 4, 8, 8)
    with torch.no_grad():
        assert sqnr_db(model(images), quantize(model, [images])(images)) >= 30


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16)
        self.conv2, self.conv3 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1)
        self.norm, self.hidden, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = F.relu6(self.conv2(F.leaky_relu(self.bn(self.conv1(x)), 0.1)))
        features = F.adaptive_avg_pool2d(F.relu(self.conv3(x)), 1).flatten(1)
        return {"features": features, "logits": self.out(F.gelu(self.hidden(self.norm(features)))) * scale}


def statistics(**options: bool) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(8, **options)
    if norm.running_mean is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 3)
    return norm


class Normed(nn.Module):
    """A convolution whose result is normalised, and read or computed again in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        if kind == "transposed in groups":
            self.conv = nn.ConvTranspose2d(8, 8, 1, groups=4)  # type: ignore[assignment]
        self.norm, self.other = statistics(track_running_stats=kind != "of the batch"), statistics()
        self.mix, self.out = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y).relu()
        if self.kind == "read by others":
            z = z + y
        elif self.kind == "two norms":
            z = z + self.other(self.conv(x * 0.5)).relu()
        elif self.kind == "once without":
            z = self.conv(z).relu()
        return self.out(self.mix(z).relu())


@pytest.mark.parametrize(
    "kind", ["read by others", "two norms", "once without", "of the batch", "transposed in groups"]
)
def test_batch_norms_are_folded_where_nothing_else_reads_the_layer(kind: str) -> None:
    x = torch.randn(4, 8, 8, 8)
    model = Normed(kind).eval()
    quantized = quantize(model, [x])
    with torch.no_grad():
        assert sqnr_db(model(x), quantized(x)) > 20
    assert "mix" in quantized.quantized_layers


def test_batch_norms_are_folded_one_after_another() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), statistics(), statistics(), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    x = torch.randn(4, 8, 8, 8)
    quantized = quantize(model, [x])
    assert not [n for n in quantized.graph.graph.nodes if n.target is torch.ops.aten.batch_norm.default]
    with torch.no_grad():
        assert sqnr_db(model(x), quantized(x)) > 25


def test_weights_that_are_computed_or_buffers_are_quantized() -> None:
    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(32, 32) / 6)
            self.layer = nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.linear(x, self.table).relu())

    assert quantize(Stored().eval(), [torch.randn(8, 32)]).quantized_layers == ("", "layer")
    normed = small(first=weight_norm(nn.Conv2d(4, 8, 3)), second=weight_norm(nn.Conv2d(8, 8, 3)))
    assert quantize(normed, [torch.rand(2, 4, 16, 16)]).quantized_layers == ("first", "second", "last")


def test_other_layers_and_several_inputs_and_outputs(tmp_path: Path) -> None:
    model = Classifier()
    for _ in range(10):
        model(torch.rand(8, 3, 32, 32), torch.ones(8, 1))
    model.eval()
    inputs = (torch.rand(8, 3, 32, 32), torch.rand(8, 1) + 0.5)
    quantized = quantize(model, [inputs, inputs])
    assert set(quantized.quantized_layers) == {"conv2", "conv3", "hidden", "out"}
    program = export(quantized, tmp_path / "q.onnx", example_inputs=inputs)
    kernels = program.metadata["quantization"]["integer_kernels"]
    assert kernels["QLinearConv"] == 2
    assert sum(kernels.values()) == 4
    with torch.no_grad():
        expected = model(*inputs)
    for reference, given in zip(expected.values(), program(*inputs)):
        assert sqnr_db(reference, given) >= 30


def test_settings_are_checked_and_need_no_torch() -> None:
    with pytest.raises(ValueError, match="calibration_batches"):
        Int8(calibration_batches=0)
    with pytest.raises(ValueError, match="observer"):
        Int8(observer="median")  # type: ignore[arg-type]
    code = "import sys; from arclight.deploy import Int8; Int8(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_importing_quantizing_and_exporting_say_nothing(tmp_path: Path) -> None:
    code = (
        "import warnings\n"
        "warnings.simplefilter('always')\n"
        "import torch\n"
        "from arclight.deploy import export, quantize\n"
        "torch.manual_seed(0)\n"
        "model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)), torch.rand(2, 4)\n"
        "export(quantize(model, [x]), 'q.onnx', example_inputs=x)\n"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    run = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    said = [line for line in (run.stdout + run.stderr).splitlines() if "it saves memory, no time" not in line]
    assert said == []  # so small a program is as fast in float32, or faster where others compute beside it


def test_the_program_runs_what_was_simulated(int8_program: Program, quantized: QuantizedModel, images: Tensor) -> None:
    for batch in (1, 2, 5):
        assert sqnr_db(quantized(images[:batch]), int8_program(images[:batch])) >= 40


def convolutions(padding: str | int, kernel: int = 3) -> torch.nn.Module:
    """Convolutions that keep their input's size, with a batch norm that has seen data."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(8, 8, kernel, padding=padding), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)
    ]  # fmt: skip
    model = torch.nn.Sequential(*layers)
    for _ in range(20):
        model(torch.randn(4, 8, 9, 8) + 1)
    return model.eval()


def test_paddings_by_name_are_those_in_numbers() -> None:
    batches = [torch.randn(4, 8, 9, 8, generator=torch.Generator().manual_seed(seed)) + 1 for seed in range(4)]
    for name, number in (("same", 1), ("valid", 0)):
        named, numbered = (quantize(convolutions(padding), batches) for padding in (name, number))
        assert named.quantized_layers == numbered.quantized_layers == ("0", "3")
        assert torch.equal(named(batches[0]), numbered(batches[0]))
        trained = [convert(prepare_qat(convolutions(padding), (batches[0],))) for padding in (name, number)]
        assert torch.equal(trained[0](batches[0]), trained[1](batches[0]))


def test_same_padding_of_even_kernels_adds_its_zeros_before_the_convolution() -> None:
    batches = [torch.randn(4, 8, 9, 8) + 1 for _ in range(4)]
    model = convolutions("same", kernel=4)
    quantized = quantize(model, batches)
    assert quantized.quantized_layers == ("0", "3")
    expected, got = model(batches[0]), quantized(batches[0])
    assert 20 * torch.log10(expected.norm() / (expected - got).norm()) > 35
