"""Verification of quantizers: sound ones pass, and each kind of broken one is named."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import FakeQuantizeBase
from torchao.quantization.pt2e import reference_representation_rewrite as rewriting
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

from arclight.deploy import ExportError, QuantizeError, benchmark, verify_quantizer
from arclight.deploy.errors import VerificationError
from arclight.deploy.programs.onnx_runtime import OnnxRuntimeSession
from arclight.deploy.quantizing import pt2e
from arclight.deploy.quantizing.placement import PlacementQuantizer
from arclight.deploy.verifying.float64_reference import run_in_float64

aten = torch.ops.aten
EPSILON, MOMENTUM, DROPOUT = 1e-3, 0.03, 0.2


class Net(nn.Module):
    """Convolutions with and without a batch norm, a concatenation, dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8, eps=EPSILON, momentum=MOMENTUM)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 16, 1)
        self.alone = nn.BatchNorm2d(16, eps=EPSILON, momentum=MOMENTUM)
        self.drop, self.out = nn.Dropout(DROPOUT), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.bn(self.conv1(x)))
        b = torch.relu(self.conv2(a))
        return self.out(self.drop(torch.relu(self.alone(torch.relu(self.conv3(torch.cat([a, b], 1)))))).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(torch.relu(self.mix(x)) + x.mean(1, keepdim=True))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for _ in range(30):
            model(torch.randn(8, 4, 8, 8))
    return model.eval()


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 4, 8, 8) for _ in range(3)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XNNPACKQuantizer is deprecated")
        yield


def x86(**options: Any) -> X86InductorQuantizer:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(**options))


def xnnpack(**options: Any) -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**options))


# --------------------------------------------------------------------------------------------------- sound quantizers


@pytest.mark.slow
def test_x86(net: nn.Module, batches: list[Tensor]) -> None:
    report = verify_quantizer(
        net, batches, x86(),
        expect={aten.conv2d.default: 3, aten.batch_norm.default: 1, "quantized_decomposed.quantize_per_tensor": (2, 4)},
        order=[torch.ops.quantized_decomposed.quantize_per_tensor.default, aten.conv2d.default, aten.linear.default],
        qparams={"conv1.input": {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255}, "conv1.weight": {"zero_point": 0}},
    )  # fmt: skip
    assert report.integer_layers == ("conv2d", "conv2d_1", "conv2d_2", "linear")
    assert report.captured["aten.batch_norm.default"] == 2  # of which one is folded
    assert 30 < report.outputs["0"].sqnr_db < 80
    assert report.judge["0"].sqnr_db > 90
    assert [shapes[0][0] for shapes in report.shapes] == [4, 4, 4, 3, 5]
    assert "4 integer layers" in str(report)


@pytest.mark.slow
def test_xnnpack_in_integer_arithmetic(net: nn.Module, batches: list[Tensor]) -> None:
    report = verify_quantizer(net, batches, xnnpack(is_per_channel=False))
    assert report.rewritten_nodes > 5
    assert 30 < report.reference["0"].sqnr_db < 100  # integer arithmetic rounds elsewhere
    assert f"{report.rewritten_nodes} nodes rewritten" in str(report)


@pytest.mark.slow
def test_patterns_are_traced_as_torchao_traces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own, count = rewriting._get_aten_graph_module_for_pattern, 0

    def nodes(graph: GraphModule) -> list[tuple[str, ...]]:
        return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.graph.nodes]

    def both(pattern: nn.Module, inputs: tuple[Any, ...]) -> GraphModule:
        nonlocal count
        theirs, count = own(pattern, inputs), count + 1
        assert nodes(pt2e.traced(pattern, inputs)) == nodes(theirs)
        return theirs

    monkeypatch.setattr(rewriting, "_get_aten_graph_module_for_pattern", both)
    graph = torch.export.export(nn.Linear(4, 4), (torch.rand(2, 4),)).module()
    rewriting.reference_representation_rewrite(graph)
    assert count > 20


@pytest.mark.slow
def test_dynamic_ranges(net: nn.Module, batches: list[Tensor]) -> None:
    quantizer = xnnpack(is_per_channel=False, is_dynamic=True)
    wanted = {"quantized_decomposed.choose_qparams": 1}
    report = verify_quantizer(net, batches[:1], quantizer, mode="dynamic", expect=wanted)
    assert report.integer_layers == ("linear",)
    assert report.judge["0"].sqnr_db > 90


@pytest.mark.slow
def test_embeddings_alone_with_free_time() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(32, (3, 6))
    free = {"tokens": {0: "batch", 1: "time"}}
    report = verify_quantizer(Tokens().eval(), [tokens], EmbeddingQuantizer(), mode="weight-only", dynamic=free)
    assert report.integer_layers == ()
    assert {shapes[0] for shapes in report.shapes} == {(3, 6), (2, 6), (4, 6), (3, 5), (3, 7)}
    assert report.rewritten_nodes == 0
    assert "no node rewritten" in str(report)


class Absent(nn.Module):
    """A network with outputs that are None."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return {"past": None, "scores": self.net(x), "hidden": None}


def test_outputs_that_are_none_are_left_out_and_doubles_judged_in_float32(
    net: nn.Module, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*_: object) -> None:
        raise AssertionError("a pattern is traced by Dynamo")

    monkeypatch.setattr(f"{rewriting.__name__}._get_aten_graph_module_for_pattern", trace)
    seven = PlacementQuantizer(weight_bits=7)  # of which no processor's sums overflow
    model, batch = copy.deepcopy(Absent(net)).double(), batches[0].double()
    report = verify_quantizer(model, [batch], seven, backends=["onnxruntime"], bounds={"speedup": 0})
    assert list(report.outputs) == ["0"]
    assert report.outputs["0"].sqnr_db > 20
    assert report.backends["onnxruntime"].outputs["0"].sqnr_db > 40


class Labelled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return scores, scores.argmax(-1) + 50_000


def test_ids_of_a_runtime_are_counted(net: nn.Module, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As values they agree to 94 dB."""
    original = OnnxRuntimeSession.run

    def run(self: OnnxRuntimeSession, values: Any) -> list[Any]:
        return [output + (output.dtype == np.int64) for output in original(self, values)]

    monkeypatch.setattr(OnnxRuntimeSession, "run", run)
    how: Any = {"backends": ["onnxruntime"], "bounds": {"speedup": 0}}
    told = r"backend_db: onnxruntime, output 1 differs in 12 of 12 elements, by up to 1, and int8 programs may differ in 1%"
    error = fails(told, Labelled(net), batches[:1], PlacementQuantizer(weight_bits=7), **how)
    assert len(error.report.failures) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_our_placement_in_a_runtime(net: nn.Module, batches: list[Tensor], backend: Any) -> None:
    report = verify_quantizer(
        net, batches[:1], PlacementQuantizer(weight_bits=7), backends=[backend], bounds={"speedup": 0},
        qparams={"cat.input0": "cat.output", "cat.input1": "cat.output", "conv2.bias": ("conv2.input", "conv2.weight")},
    )  # fmt: skip
    found = report.backends[backend]
    assert found.integer_kernels == len(report.integer_layers) == 4
    assert found.outputs["0"].sqnr_db > 40
    assert found.speedup is not None


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_a_program_must_be_faster_than_float(
    net: nn.Module, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    def timed(*arguments: Any, **options: Any) -> Any:
        table = benchmark(*arguments, **{**options, "rounds": 1})
        return dataclasses.replace(table, rows=tuple(dataclasses.replace(row, speedup=ratio) for row in table.rows))

    monkeypatch.setattr("arclight.deploy.verifying.verify.benchmark", timed)
    how: Any = {"quantizer": PlacementQuantizer(weight_bits=7), "backends": ["onnxruntime"]}
    if ratio > 1:
        assert verify_quantizer(net, batches[:1], **how).backends["onnxruntime"].speedup == ratio
        return
    told = rf"speedup: in onnxruntime the quantized program is {ratio:.2f} x as fast .* more than 1\.00 x.* bounds=\{{'speedup': "
    error = fails(told, net, batches[:1], **how)
    assert (len(error.report.failures), error.report.backends["onnxruntime"].speedup) == (1, ratio)
    report = verify_quantizer(net, batches[:1], **how, bounds={"speedup": 0.5})
    assert report.backends["onnxruntime"].speedup == ratio


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: x86(is_qat=True), lambda: PlacementQuantizer(qat=True)])
def test_training(net: nn.Module, batches: list[Tensor], make: Callable[[], Any]) -> None:
    weight = net.conv1.weight.clone()
    report = verify_quantizer(net, batches, make(), mode="qat", qat_steps=3, expect={aten.batch_norm.default: 1})
    assert report.literals == {
        "bn.running_mean": (MOMENTUM, EPSILON), "alone.running_mean": (MOMENTUM, EPSILON), "dropout 0": (DROPOUT,),
    }  # fmt: skip
    assert report.trained["0"].sqnr_db > 25
    assert report.outputs["0"].sqnr_db > 20
    assert torch.equal(net.conv1.weight, weight)


@pytest.mark.slow
def test_trained_placement_runs_on_integers(net: nn.Module, batches: list[Tensor]) -> None:
    quantizer = PlacementQuantizer(qat=True)
    report = verify_quantizer(
        net, batches[:1], quantizer, mode="qat", qat_steps=1, backends=["onnxruntime"], bounds={"speedup": 0}
    )
    assert report.backends["onnxruntime"].integer_kernels == 4


@pytest.mark.slow
def test_ranges_come_from_all_batches(net: nn.Module, batches: list[Tensor]) -> None:
    wide = [batches[0], batches[1] * 4]
    low, high = float(wide[1].min()), float(wide[1].max())
    quantizer = PlacementQuantizer(observer="minmax")
    first = np.float32(float(batches[0].max()) - float(batches[0].min())) / 255
    error = fails("conv1.input has scale", net, wide, quantizer, qparams={"conv1.input": {"scale": first}})
    found = re.search(r"conv1.input has scale \[?([\d.e-]+)", str(error))
    assert found is not None, error
    assert float(found[1]) == pytest.approx((high - low) / 255, rel=1e-3)


# -------------------------------------------------------------------------------------------------- broken quantizers


def fails(message: str, *arguments: Any, **options: Any) -> VerificationError:
    with pytest.raises(VerificationError, match=message) as caught:
        verify_quantizer(*arguments, **options)
    return caught.value


class Idle(pt2e.Quantizer):
    """Annotates nothing."""

    def annotate(self, model: GraphModule) -> GraphModule:
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def test_a_quantizer_that_annotates_nothing(net: nn.Module, batches: list[Tensor]) -> None:
    fails("annotates nothing", net, batches, Idle())
    fails("annotates nothing", net, batches, X86InductorQuantizer())  # without a configuration


class Unshared(PlacementQuantizer):
    """Gives each part of a concatenation a range of its own."""

    def _annotate_movement(self, node: Node, sources: list[Node]) -> None:
        pt2e.annotate(node, inputs={source: self._spec(source) for source in sources}, output=self.activation)
        self._quantized[node] = self.activation


@pytest.mark.slow
def test_a_concatenation_that_is_not_shared(net: nn.Module, batches: list[Tensor]) -> None:
    shared = {"cat.input0": "cat.output", "cat.input1": "cat.output"}
    verify_quantizer(net, batches[:1], PlacementQuantizer(), qparams=shared)
    error = fails(
        "cat.input. has scale .*those of cat.output, which it shares", net, batches, Unshared(), qparams=shared
    )
    assert "qparams" in error.report.failures[0]


class Fixed(PlacementQuantizer):
    """Asks for a scale of 1/16 at the input."""

    SPEC = {"dtype": torch.uint8, "scale": 1 / 16, "zero_point": 128, "quant_min": 0, "quant_max": 255}

    def annotate(self, graph: GraphModule) -> GraphModule:
        annotated = super().annotate(graph)
        layer = next(node for node in graph.graph.nodes if node.target is aten.conv2d.default)
        spec = FixedQParamsQuantizationSpec(qscheme=torch.per_tensor_affine, **self.SPEC)
        pt2e.annotation_of(layer).input_qspec_map[layer.args[0]] = spec
        pt2e.annotation_of(layer).input_qspec_map.pop(layer.args[2], None)  # its unit is that of the input
        return annotated


@pytest.mark.slow
def test_wrong_scales_and_levels(net: nn.Module, batches: list[Tensor]) -> None:
    spec = FixedQParamsQuantizationSpec(qscheme=torch.per_tensor_affine, **Fixed.SPEC)
    verify_quantizer(net, batches[:1], Fixed(), qparams={"conv1.input": spec})
    fails("conv1.input has scale .*, expected 0.0625, as specified", net, batches, PlacementQuantizer(),
          qparams={"conv1.input": spec})  # fmt: skip
    fails("conv1.weight has quant_max 127, expected 7", net, batches, PlacementQuantizer(),
          qparams={"conv1.weight": {"quant_max": 7}})  # fmt: skip
    fails("conv2.bias has scale .* the product of conv1.input and conv2.weight", net, batches, PlacementQuantizer(),
          qparams={"conv2.bias": ("conv1.input", "conv2.weight")})  # fmt: skip


class OtherEpsilon(PlacementQuantizer):
    """Writes batch norms anew with torch's default epsilon, as torchao does."""

    def transform_for_annotation(self, graph: GraphModule) -> GraphModule:
        for node in graph.graph.nodes:
            if node.target is aten.batch_norm.default:
                node.update_arg(7, 1e-5)
        return super().transform_for_annotation(graph)


@pytest.mark.parametrize("mode", ["static", "qat"])
def test_a_changed_epsilon(net: nn.Module, batches: list[Tensor], mode: Any) -> None:
    error = fails(r"literals: alone.running_mean has .*1e-05\), the model has \(0.03, 0.001\)", net, batches,
                  OtherEpsilon(qat=mode == "qat"), mode=mode)  # fmt: skip
    assert ("bn.running_mean" in str(error)) == (mode == "qat")  # in static mode that one is folded before


class Replaced(PlacementQuantizer):
    """Replaces ReLU by another activation."""

    def transform_for_annotation(self, graph: GraphModule) -> GraphModule:
        for node in graph.graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = aten.sigmoid.default
        graph.recompile()
        return super().transform_for_annotation(graph)


def test_a_graph_that_computes_something_else(net: nn.Module, batches: list[Tensor]) -> None:
    error = fails("annotation: the graph that the quantizer has prepared", net, batches, Replaced())
    assert "sqnr_db: output 0" in str(error)


class Dead(FakeQuantizeBase):
    """Rounds, and lets no gradient through."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.dtype, self.qscheme, self.ch_axis = torch.int8, torch.per_tensor_symmetric, -1
        self.quant_min, self.quant_max = -127, 127

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([0.01]), torch.tensor([0])


class NoGradient(PlacementQuantizer):
    def annotate(self, graph: GraphModule) -> GraphModule:
        annotated = super().annotate(graph)
        layer = next(node for node in graph.graph.nodes if node.target is aten.linear.default)
        spec = pt2e.QuantizationSpec(dtype=torch.int8, observer_or_fake_quant_ctr=Dead)
        pt2e.annotation_of(layer).input_qspec_map[layer.args[1]] = spec
        return annotated


def test_weights_without_a_gradient(net: nn.Module, batches: list[Tensor]) -> None:
    fails(r"rounded weights \['out.weight'\] get no gradient", net, batches, NoGradient(qat=True), mode="qat")


@pytest.mark.slow
def test_a_placement_that_no_kernel_takes(net: nn.Module, batches: list[Tensor]) -> None:
    error = fails("integer_share: onnxruntime runs 0 of 4", net, batches[:1], x86(), backends=["onnxruntime"])
    assert error.report.outputs["0"].sqnr_db > 30  # a right result at the speed of float


@pytest.mark.slow
def test_counts_order_and_bounds(net: nn.Module, batches: list[Tensor]) -> None:
    error = fails(
        "checks", net, batches[:1], PlacementQuantizer(),
        expect={aten.conv2d.default: 4, aten.linear.default: (2, 9)}, order=[aten.linear.default, aten.conv2d.default],
        bounds={"node_sqnr_db": 200, "judge_db": 500, "sqnr_db": 30, "speedup": 1e6, "integer_share": 0},
        backends=["openvino"],
    )  # fmt: skip
    for said in (
        "expect: aten.conv2d.default is 3 times in the converted graph, expected 4",
        "expect: aten.linear.default is 1 times in the converted graph, expected 2 to 9",
        "order: the converted graph has no aten.conv2d.default behind aten.linear.default",
        "judge_db: output 0 has 1",
        "node_sqnr_db: conv2d_1 (conv2) has ",
        "speedup: in openvino the quantized program is ",
    ):
        assert said in str(error), said


def test_modes_that_a_quantizer_is_not(net: nn.Module, batches: list[Tensor]) -> None:
    fails("no range is chosen at run time", net, batches[:1], PlacementQuantizer(), mode="dynamic")
    fails(
        "activations are rounded, and mode is 'weight-only'", net, batches[:1], PlacementQuantizer(), mode="weight-only"
    )
    fails("no activation is rounded in a fixed range, and mode is 'static'", net, batches[:1],
          xnnpack(is_per_channel=False, is_dynamic=True))  # fmt: skip


# ------------------------------------------------------------------------------------- expectations that cannot fail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expect": {aten.silu.default: 0}}, "aten.silu.default is in neither"),
        ({"expect": {"aten.conv2.default": 0}}, "did you mean aten.conv2d.default"),
        ({"expect": {aten.conv2d.default: (3, 1)}}, r"expected \(3, 1\) times"),
        ({"order": [aten.conv2d.default]}, "a single operator has no order"),
        ({"order": [aten.conv2d.default, aten.silu.default]}, "order: aten.silu.default is in neither"),
        ({"qparams": {"conv9.input": {"scale": 1.0}}}, "did you mean conv"),
        ({"qparams": {"conv1.output": {"scale": 1.0}}}, "conv1.output is not rounded"),
        ({"qparams": {"conv1.input": {}}}, "cannot be checked"),
        ({"qparams": {"conv1.input": {"scales": 1.0}}}, "'scales'"),
        ({"qparams": {"conv1.input": ("conv1.weight",)}}, "product of two fixed scales"),
    ],
)
def test_vacuous_expectations(net: nn.Module, batches: list[Tensor], options: dict[str, Any], message: str) -> None:
    fails(message, net, batches[:1], PlacementQuantizer(), **options)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"quantizer": object()}, TypeError, "Quantizer of torchao, got object"),
        ({"inputs": []}, QuantizeError, "no batch"),
        ({"mode": "statik"}, ValueError, "got 'statik'"),
        ({"qat_steps": 3}, ValueError, "qat_steps"),
        ({"bounds": {"sqnr": 1.0}}, ValueError, "did you mean 'sqnr_db'"),
        ({"bounds": {"speedup": 1.0}}, ValueError, "name at least one"),
        ({"backends": ["tensorrt"]}, ValueError, "tensorrt"),
        ({"mode": "dynamic", "backends": ["openvino"]}, ValueError, "DynamicInt8"),
        ({"dynamic": {"images": {0: "batch"}}}, ExportError, r"\['images'\]; the model takes \['x'\]"),
        ({"dynamic": {"x": {7: "batch"}}}, ExportError, "dimension 7 of x"),
        ({"dynamic": {"x": {2: "side", 1: "side"}}}, ExportError, "equal names stand for equal sizes"),
        ({"dynamic": {"x": {1: "channels"}}}, ExportError, "cannot be named in dynamic"),
    ],
)
def test_arguments(
    net: nn.Module, batches: list[Tensor], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = {"inputs": batches[:1], "quantizer": PlacementQuantizer()} | options
    with pytest.raises(kind, match=message):
        verify_quantizer(net, **given)


# ---------------------------------------------------------------------------------------------------------- the judge


def test_the_judge_computes_integers_by_hand() -> None:
    """A rounded linear layer against NumPy, integers and all, with ties and values beyond the range."""

    class Rounded(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            ops = torch.ops.quantized_decomposed
            x = ops.dequantize_per_tensor(
                ops.quantize_per_tensor(x, 0.5, 3, 0, 15, torch.uint8), 0.5, 3, 0, 15, torch.uint8
            )
            scales, zeros = torch.tensor([0.25, 0.125]), torch.tensor([0, 1])
            levels = (0, -8, 7, torch.int8)
            weight = ops.dequantize_per_channel(
                ops.quantize_per_channel(weight, scales, zeros, *levels), scales, zeros, *levels
            )
            return nn.functional.linear(x, weight)

    x = torch.tensor([[0.25, 0.75, -0.25, 100.0, -100.0]])
    weight = torch.tensor([[0.125, 0.375, -9.0, 1.0, 2.0], [0.0625, 0.2, -0.3, 0.9, 5.0]])
    graph = torch.export.export(Rounded(), (x, weight)).module(check_guards=False)
    assert isinstance(graph, GraphModule)
    integers = np.clip(np.rint(x.double().numpy() / 0.5) + 3, 0, 15) - 3
    assert integers.tolist() == [[0, 2, 0, 12, -3]]
    rows = np.array([[0.25], [0.125]])
    zeros = np.array([[0], [1]])
    matrix = np.clip(np.rint(weight.double().numpy() / rows) + zeros, -8, 7) - zeros
    expected = (integers * 0.5) @ (matrix * rows).T
    (given,) = run_in_float64(graph, (x, weight))
    assert given.dtype == torch.float64
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-15)
    np.testing.assert_allclose(graph(x, weight).numpy(), expected, rtol=1e-6)


def test_the_judge_refuses_levels_that_the_type_does_not_hold() -> None:
    class Beyond(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.5, 0, 0, 255, torch.uint8)

    x = torch.rand(3)
    graph = torch.export.export(Beyond(), (x,)).module(check_guards=False)
    assert isinstance(graph, GraphModule)
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.update_arg(5, torch.int8)
    with pytest.raises(QuantizeError, match=r"rounds to 0 .. 255, which torch.int8 does not hold"):
        run_in_float64(graph, (x,))
