"""Placement by target: which tensors become integers for a runtime, and what its program says of that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from tests.exports import compare_here
from torch import Tensor, nn

from arclight.deploy import (
    BFloat16,
    ExportError,
    Int8,
    Program,
    QuantizeError,
    WeightOnly,
    convert,
    export,
    prepare_qat,
    quantize,
)
from arclight.deploy.quantizing.observers import LeastErrorObserver
from arclight.deploy.settings import PLACEMENTS, Target


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch)  # those of the fixtures are compared in a fresh one


class Residual(nn.Module):
    """A stem, a block with a sum, pooling, and a head that is decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.SiLU())
        self.one = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())
        self.two = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.pool(torch.cat([x + self.two(self.one(x)), x], 1))).sigmoid()


BATCH = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.fixture(scope="module")
def by_default(residual: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program of a model that was quantized for no target by name."""
    path = tmp_path_factory.mktemp("residual") / "q.onnx"
    return export(quantize(residual, [BATCH]), path, example_inputs=BATCH)


def ops(graph: torch.fx.GraphModule, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and name in str(node.target)]


@pytest.mark.parametrize("target", get_args(Target))
def test_each_target_rounds_in_its_own_integers(residual: nn.Module, target: Target) -> None:
    quantized = quantize(residual, [BATCH], target=target)
    assert quantized.target == target
    assert quantized.sqnr_db > 30
    rounded = ops(quantized.graph, "quantize_per_tensor")
    signed = target in ("executorch", "tensorrt")
    assert {node.args[5] for node in rounded} == {torch.int8 if signed else torch.uint8}
    assert all(node.args[2] == 0 for node in rounded) == (target == "tensorrt")  # zero points
    assert bool(ops(quantized.graph, "aten.silu")) == (target != "onnxruntime")


def test_a_fused_activation_is_rounded_once(residual: nn.Module) -> None:
    graph = quantize(residual, [BATCH], target="openvino").graph
    for node in ops(graph, "aten.silu"):
        assert "conv2d" in str(node.args[0].target)  # nothing is rounded between the two
        assert all("quantize_per_tensor" in str(user.target) for user in node.users)


@pytest.mark.slow
def test_an_openvino_program_has_fewer_operators_than_one_placed_for_onnxruntime(
    residual: nn.Module, by_default: Program, tmp_path: Path
) -> None:
    placed = export(quantize(residual, [BATCH], target="openvino"), tmp_path / "ov.onnx", example_inputs=BATCH)
    there = Program.load(by_default.path, runtime="openvino")

    def operators(program: Program) -> int:
        return sum(
            count for (kind, _), count in program.openvino_kernels().items() if kind not in ("Input", "Output", "Const")
        )

    assert operators(placed) < operators(there)  # gates and their products are computed by the convolutions
    report = placed.metadata["quantization"]
    assert (placed.runtime, report["target"]) == ("openvino", "openvino")
    assert report["integer_kernels"] == {"Convolution": 4}
    assert report["speed"]["low"] <= report["speed"]["over_fp32"] <= report["speed"]["high"]
    assert "openvino" in placed.metadata["versions"]
    again = Program.load(placed.path)
    assert again.runtime == "openvino"
    np.testing.assert_array_equal(again(BATCH.numpy()), placed(BATCH.numpy()))


def test_onnxruntime_stays_the_default_and_is_timed_there(by_default: Program) -> None:
    report = by_default.metadata["quantization"]
    assert report["target"] == "onnxruntime"
    assert report["integer_kernels"]["QLinearConv"] == 2
    assert report["speed"]["over_fp32"] > 0


def test_tensorrt_gets_symmetric_pairs_and_a_float_bias(
    residual: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = export(quantize(residual, [BATCH], target="tensorrt"), tmp_path / "trt.onnx", example_inputs=BATCH)
    graph = onnx.load(program.path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs
    for node in pairs:
        zero_point = stored[node.input[2]]
        assert zero_point.dtype == np.int8
        assert not zero_point.any()
    assert "speed" not in program.metadata["quantization"]
    assert "not measured" in caplog.text


@pytest.mark.parametrize("target", ["inductor", "executorch"])
def test_targets_that_run_no_onnx_are_refused_by_export(residual: nn.Module, target: Target, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"quantized for {target}, which does not run ONNX"):
        export(quantize(residual, [BATCH], target=target), tmp_path / "q.onnx", example_inputs=BATCH)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trained_model_is_placed_for_its_target_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(4, 8, 3), "norm": nn.BatchNorm2d(8), "act": nn.SiLU(), "b": nn.Conv2d(8, 4, 1)}
    inputs = torch.rand(4, 4, 8, 8)
    prepared = prepare_qat(nn.Sequential(OrderedDict(layers)), inputs, target="openvino")
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(inputs).square().mean().backward()
        optimizer.step()
    program = export(convert(prepared.eval()), tmp_path / "qat.onnx", example_inputs=inputs)
    assert program.metadata["quantization"]["integer_kernels"] == {"Convolution": 2}
    symmetric = convert(prepare_qat(nn.Sequential(OrderedDict(layers)), inputs, target="tensorrt").eval())
    assert {node.args[2] for node in ops(symmetric.graph, "quantize_per_tensor")} == {0}
    assert not [node for node in ops(symmetric.graph, "dequantize") if node.args[-1] == torch.int32]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(nn.Linear(32, 8), [torch.rand(2, 32)], target="openvin"), "'openvin' is not known; did you mean 'openvino'"),
        (lambda: quantize(nn.Linear(32, 8), [torch.rand(2, 32)], target="npu"), "'npu' is not known: there are onnxruntime, openvino"),
        (
            lambda: quantize(nn.Linear(32, 8), recipe=WeightOnly(), example=torch.rand(2, 32), target="openvino"),
            "WeightOnly has kernels only in target 'onnxruntime'",
        ),
        (
            lambda: quantize(nn.Linear(32, 8), recipe=BFloat16(), example=torch.rand(2, 32), target="onnxruntime"),
            "BFloat16 has kernels only in target 'openvino'",
        ),
        (lambda: prepare_qat(nn.Linear(32, 8), torch.rand(2, 32), target="tensorflow"), "target 'tensorflow' is not known"),
    ],
)  # fmt: skip
def test_unknown_targets_and_those_without_kernels_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        call()


def test_every_target_has_a_placement() -> None:
    assert set(PLACEMENTS) == set(get_args(Target))
    assert (
        quantize(nn.Linear(32, 8), [torch.rand(8, 32)], recipe=Int8(observer="minmax"), target="openvino").target
        == "openvino"
    )


def test_a_symmetric_range_has_the_least_error() -> None:
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)) ** 3
    observer = LeastErrorObserver(
        dtype=torch.int8, eps=1e-9, qscheme=torch.per_tensor_symmetric, quant_min=-127, quant_max=127
    )
    observer(values)
    scale, zero_point = observer.calculate_qparams()
    assert int(zero_point) == 0

    def error(unit: float) -> float:
        exact = values.double().numpy()
        return float((np.abs(np.clip(np.round(exact / unit), -127, 127) * unit - exact) ** 2.4).sum())

    tried = [float(values.abs().max()) / 127 * share for share in np.linspace(0.5, 1, 101)]
    assert error(float(scale)) <= 1.1 * min(map(error, tried))
