"""Quantizers of torchao through `quantize`, and what it refuses of them and of models that are rounded already."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exports import compare_here
from torch import nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import disable_observer, move_exported_model_to_eval
from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.composable_quantizer import ComposableQuantizer
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

from arclight.deploy import ExportError, Int8, QuantizeError, WeightOnly, export, prepare_qat, quantize
from arclight.deploy.programs import processor
from arclight.deploy.quantizing import batch_norm, pt2e
from arclight.fabric.signing import SigningKey


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch, rounds=3)


def x86(**options: Any) -> Any:
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(**options))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(196, 5))
    return nn.Sequential(*layers).eval()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.table(tokens))


X = torch.rand(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(20).reshape(4, 5)


def test_a_quantizer_is_for_its_runtime_and_layers_are_named(model: nn.Module) -> None:
    xnnpack = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    for quantizer, target in ((x86(), "inductor"), (xnnpack, "executorch")):
        found = quantize(model, [X], quantizer=quantizer)
        assert (found.target, found.quantizer) == (target, type(quantizer).__name__)
        assert (found.quantized_layers, found.float_layers) == (("0", "4"), ("2",))
        assert found.sqnr_db > 25


def test_a_refused_placement_is_not_blamed_on_a_field_that_nobody_reads(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1)).eval()
    placed = quantize(model, [X], quantizer=x86(), target="onnxruntime")
    with pytest.raises(ExportError, match="quantized layers became integer kernels in ONNX Runtime") as refused:
        export(placed, tmp_path / "x86.onnx", example_inputs=X)
    assert "skip" not in str(refused.value), "a quantizer of torchao does not read Int8.skip"


def test_a_quantizer_of_8_bits_is_refused_with_the_reason_where_sums_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset({"avx", "avx2"}))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    placed = quantize(model, [X], quantizer=x86(), target="onnxruntime")
    with pytest.raises(ExportError, match=r"has no VNNI, .* X86InductorQuantizer round weights to 7 bits"):
        export(placed, tmp_path / "x86.onnx", example_inputs=X, max_difference=-1.0)


@pytest.mark.slow
def test_inductors_own_quantizer_runs_on_integers_in_aoti(tmp_path: Path) -> None:
    """Compiled as it is documented, with gradients and without freezing, not one of its layers would be an integer kernel."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    model = nn.Sequential(*layers).eval()
    placed = quantize(model, [X], quantizer=x86(reduce_range=processor.overflows()))
    key = SigningKey.make(tmp_path / "key.pem")
    program = export(placed, tmp_path / "p", example_inputs=X, sign=key, dynamic_batch=False)
    report = program.metadata["quantization"]
    assert (program.format, report["quantizer"], report["quantized_layers"]) == ("aoti", "X86InductorQuantizer", 3)
    assert sum(report["integer_kernels"].values()) == 3
    torch.testing.assert_close(program(X), placed(X), rtol=0, atol=0.02)


VNNI = {"avx", "avx2", "avx512_vnni"}


@pytest.mark.parametrize(
    ("present", "target", "refused"),
    [
        (VNNI, "onnxruntime", True),
        (VNNI | {"avx_vnni_int8"}, "onnxruntime", False),
        pytest.param(VNNI, "executorch", False, marks=pytest.mark.slow),
        ({"asimd", "asimddp"}, "onnxruntime", False),
        pytest.param(set(), "onnxruntime", False, marks=pytest.mark.slow),
    ],
)
def test_signed_activations_are_refused_where_their_kernels_are_slow(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, present: set[str], target: Any, refused: bool
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset(present))
    xnnpack = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    if refused:
        with pytest.raises(QuantizeError, match=r"no AVX-VNNI-INT8: 0, 4; leave quantizer out, since Int8\(\)"):
            quantize(model, [X], quantizer=xnnpack, target=target)
    else:
        assert quantize(model, [X], quantizer=xnnpack, target=target).quantized_layers == ("0", "4")


def test_unsigned_activations_and_signed_tables_are_taken_without_avx_vnni_int8(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset(VNNI))
    assert quantize(model, [X], quantizer=x86(), target="onnxruntime").quantized_layers == ("0", "4")
    assert quantize(model, [X]).target == "onnxruntime"
    words = quantize(Words().eval(), [TOKENS], quantizer=EmbeddingQuantizer(), target="onnxruntime")
    assert words.quantized_layers == ("table",)


def test_embeddings_alone_and_composed() -> None:
    words = Words().eval()
    alone = quantize(words, [TOKENS], quantizer=EmbeddingQuantizer(), target="onnxruntime")
    assert (alone.quantized_layers, alone.float_layers) == (("table",), ("out",))
    both = quantize(words, [TOKENS], quantizer=ComposableQuantizer([EmbeddingQuantizer(), x86()]))
    assert (both.target, both.quantized_layers) == ("inductor", ("table", "out"))
    with pytest.raises(QuantizeError, match="EmbeddingQuantizer is not known to be for a runtime: give target="):
        quantize(words, [TOKENS], quantizer=EmbeddingQuantizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantizer": X86InductorQuantizer()}, "X86InductorQuantizer rounds no layer: .* 0, 2, 4"),
        ({"quantizer": x86(is_dynamic=True)}, r"takes ranges of each call, .* take DynamicInt8\(\)"),
        ({"quantizer": "x86"}, "quantizer must be a Quantizer of torchao"),
        ({"quantizer": x86(), "recipe": Int8(skip=("0",))}, "would ignore Int8"),
        ({"quantizer": x86(), "recipe": WeightOnly()}, "would ignore WeightOnly"),
        ({"quantizer": x86(), "metric": lambda m: -float(m(X).std()) - hasattr(m, "recipe"), "max_drop": 0.1}, "let X86InductorQuantizer leave"),
        ({"target": ["openvino"]}, "is not known"),
    ],
)  # fmt: skip
def test_ignored_options_and_unknown_targets_are_refused(model: nn.Module, options: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        quantize(model, [X], **options)


def test_a_quantized_model_is_not_quantized_again(model: nn.Module) -> None:
    quantized = quantize(nn.Sequential(nn.Linear(8, 8)), [torch.rand(4, 8)])
    with pytest.raises(QuantizeError, match="the model is a QuantizedModel, which is rounded already"):
        quantize(quantized, [torch.rand(4, 8)])


@pytest.mark.parametrize("recipe", [Int8(), WeightOnly()])
def test_models_that_train_with_rounding_are_not_quantized_again(recipe: Any, tmp_path: Path) -> None:
    x = torch.rand(4, 32)
    prepared = nn.Sequential(prepare_qat(nn.Sequential(nn.Linear(32, 32)), x, recipe=recipe), nn.Tanh())
    kind = "PreparedModel (0)" if recipe == Int8() else "RoundedLinear (0.0)"
    with pytest.raises(QuantizeError, match=f"the model holds a {re.escape(kind)}, which is rounded already"):
        prepare_qat(prepared, x, recipe=recipe)
    with pytest.raises(QuantizeError, match=f"the model holds a {re.escape(kind)}, which is rounded already"):
        quantize(prepared, recipe=WeightOnly(), example=x)
    with pytest.raises(ExportError, match=f"the model holds a {re.escape(kind)}, .* export what convert"):
        export(prepared, tmp_path / "p.onnx", example_inputs=x)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_models_and_data_of_other_types_are_quantized_in_float32(dtype: torch.dtype) -> None:
    layer, inputs = nn.Sequential(nn.Linear(8, 8)).to(dtype), torch.rand(4, 8).to(dtype)
    quantized = quantize(layer, [inputs])
    assert torch.equal(quantized(inputs), quantize(layer.float(), [inputs.float()])(inputs.float()))


class RoundedBias(X86InductorQuantizer):
    """Asks for the bias of each convolution as well."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.set_global(get_default_x86_inductor_quantization_config(is_qat=True))
        self.spec = spec

    def annotate(self, graph: GraphModule) -> GraphModule:
        annotated = super().annotate(graph)
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.conv2d.default:
                pt2e.annotation_of(node).input_qspec_map[node.args[2]] = self.spec(node)
        return annotated


def prepared_for_training(spec: Any) -> tuple[GraphModule, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=True)).train()
    graph = torch.export.export(model, (X,)).module()
    return pt2e.prepare_qat(graph, RoundedBias(spec), batch_norm.fuse), model


def test_a_bias_before_a_batch_norm_is_rounded_as_the_quantizer_asks() -> None:
    prepared, _ = prepared_for_training(lambda node: pt2e.bias_spec(node.args[0], node))
    prepared(X)
    batch_norm.set_training(prepared, False)
    expected = prepared(X)
    batch_norm.fold(prepared)
    prepared(X)
    converted = pt2e.convert(prepared, fold=True)
    layers = [node for node in converted.graph.nodes if node.target is torch.ops.aten.conv2d.default]
    for layer in layers:
        bias, weight, source = layer.args[2], layer.args[1], layer.args[0]
        assert {bias.target, weight.target} == {torch.ops.quantized_decomposed.dequantize_per_channel.default}
        held = {
            name: converted.get_buffer(str(node.args[0].target)) for name, node in (("bias", bias), ("weight", weight))
        }
        assert (held["bias"].dtype, held["weight"].dtype) == (torch.int32, torch.int8)
        scales = [converted.get_buffer(str(node.args[1].target)) for node in (bias, weight)]
        torch.testing.assert_close(scales[0], scales[1] * float(source.args[1]), check_dtype=False)
    assert len(layers) == 2
    assert (converted(X) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    "spec, message",
    [
        (lambda node: SharedQuantizationSpec((node.args[0], node)), "cannot share a range"),
        (lambda node: pt2e.bias_spec(other_layer(node).args[0], other_layer(node)), "only derive from those of"),
    ],
)
def test_a_bias_before_a_batch_norm_has_a_range_of_its_own(spec: Any, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        prepared_for_training(spec)


def other_layer(node: Node) -> Node:
    return next(n for n in node.graph.nodes if n.target is node.target and n is not node)


def test_a_graph_prepared_for_training_refuses_modes_that_would_not_reach_its_batch_norms() -> None:
    graph = torch.export.export(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).train(), (X,)).module()
    graph.meta["note"] = "kept"
    prepared = pt2e.prepare_qat(graph, x86(is_qat=True), batch_norm.fuse)
    for switch in (prepared.eval, prepared.train):
        with pytest.raises(NotImplementedError, match="not supported for exported models"):
            switch()
    assert prepared.meta["note"] == "kept"
    mean = next(value for name, value in prepared.named_buffers() if name.endswith("running_mean"))
    for training in (False, True):  # what does reach them
        before = mean.clone()
        batch_norm.set_training(prepared, training)
        prepared(X)
        assert torch.equal(mean, before) != training


@pytest.mark.parametrize("bias", [False, True])
def test_batch_norms_are_folded_after_the_switch_of_modes_of_torchao(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=bias), nn.BatchNorm2d(8)).train()
    prepared = pt2e.prepare_qat(torch.export.export(model, (X,)).module(), x86(is_qat=True), batch_norm.fuse)
    prepared(X)
    move_exported_model_to_eval(prepared)
    prepared.apply(disable_observer)
    expected = prepared(X)
    batch_norm.fold(prepared)
    torch.testing.assert_close(prepared(X), expected)
    converted = pt2e.convert(prepared, fold=True)
    operators = [str(node.target) for node in converted.graph.nodes]
    assert operators.count("aten.conv2d.default") == 1
    assert not {"aten.batch_norm.default", "aten.div.Tensor"} & set(operators)
    before = {name: value.clone() for name, value in converted.named_buffers()}
    converted(X)
    torch.testing.assert_close(dict(converted.named_buffers()), before)  # batches are not counted any more
