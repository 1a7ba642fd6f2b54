"""Import torchao's PT2E quantization in one place, since its names move between releases.

All of `quantizing` and `verifying` that inserts, reads or converts observers goes through this; ``benchmarks/torchao_tests.py`` runs torchao's own
tests on `prepare`, `prepare_qat` and `convert`. They call and replace private functions of torchao: a new release (pyproject pins one) needs a look
here. Importing torchao without its CUDA kernels logs missing libraries and a deprecation that users can do nothing about; these messages are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arclight.fabric.extras import require


@contextmanager
def _dropped(logger: str, text: str) -> Iterator[None]:
    """Filter messages with ``text`` from ``logger`` within the block."""

    def keep(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    target = logging.getLogger(logger)
    target.addFilter(keep)
    try:
        yield
    finally:
        target.removeFilter(keep)


with _dropped("torchao", "Failed to load"), _dropped("torch.utils._pytree", "is an Enum subclass"):
    _pt2e = require("torchao.quantization.pt2e", extra="deploy")
    _prepare_convert = require("torchao.quantization.pt2e.quantize_pt2e", extra="deploy")
    _prepare = require("torchao.quantization.pt2e.prepare", extra="deploy")
    _utils = require("torchao.quantization.pt2e.utils", extra="deploy")
    _qat_utils = require("torchao.quantization.pt2e.qat_utils", extra="deploy")
    _rewrite = require("torchao.quantization.pt2e.reference_representation_rewrite", extra="deploy")
    _quantizer = require("torchao.quantization.pt2e.quantizer", extra="deploy")

_prepare_pt2e, _convert_pt2e = _prepare_convert.prepare_pt2e, _prepare_convert.convert_pt2e
Quantizer: Any = _quantizer.Quantizer
QuantizationSpec: Any = _quantizer.QuantizationSpec
FixedSpec: Any = _quantizer.FixedQParamsQuantizationSpec
SharedSpec: Any = _quantizer.SharedQuantizationSpec
DerivedSpec: Any = _quantizer.DerivedQuantizationSpec
ObserverBase: Any = _pt2e.ObserverBase
MinMaxObserver: Any = _pt2e.MinMaxObserver
PerChannelMinMaxObserver: Any = _pt2e.PerChannelMinMaxObserver
DerivedRange: Any = _pt2e.DerivedObserverOrFakeQuantize
_LARGEST_BIAS = 2**30
"""Largest absolute value that a bias has as an integer; sums of products are added to it in int32."""
FakeQuantize: Any = _pt2e.FakeQuantizeBase
OBSERVERS: Any = (_pt2e.ObserverBase, _pt2e.FakeQuantizeBase)
# torch has these operators only after torchao's import
QUANTIZE = {
    torch.ops.quantized_decomposed.quantize_per_tensor.default,
    torch.ops.quantized_decomposed.quantize_per_tensor.tensor,
    torch.ops.quantized_decomposed.quantize_per_channel.default,
}
DEQUANTIZE = {
    torch.ops.quantized_decomposed.dequantize_per_tensor.default,
    torch.ops.quantized_decomposed.dequantize_per_tensor.tensor,
    torch.ops.quantized_decomposed.dequantize_per_channel.default,
}

_ANNOTATION_KEY = "quantization_annotation"
_ACTIVATION_EPS = 2.0**-16
_WEIGHT_EPS = 2.0**-16


def activation_spec(
    observer: Any, bits: int = 8, *, signed: bool = False, zero_point: bool = True, **options: Any
) -> Any:  # fmt: skip
    """Return the spec of activations, with one scale for each tensor.

    By default they are unsigned, with a zero point: in 8 bits that is the activation type of the fast integer kernels on x86. ``signed`` without
    ``zero_point`` is TensorRT's, with it XNNPACK's. ``observer``: a class derived from ObserverBase, made with ``options``.
    """
    least = -(2 ** (bits - 1)) if signed else 0
    return QuantizationSpec(
        dtype=torch.int8 if signed else torch.uint8,
        observer_or_fake_quant_ctr=observer.with_args(eps=_ACTIVATION_EPS, **options),
        quant_min=least + (signed and not zero_point),
        quant_max=least + 2**bits - 1,
        qscheme=torch.per_tensor_affine if zero_point else torch.per_tensor_symmetric,
    )


def weight_spec(weight: torch.Tensor, *, bits: int = 8, observer: Any = PerChannelMinMaxObserver) -> Any:
    """Return the spec of weights: signed integers of ``bits``, a scale per output channel.

    There is no zero point, and channels are the first dimension. A channel's scale is at least 2^-16 of the largest
    weight: runtimes hold the bias as int32 in units of (activation scale x weight scale), which overflows if a
    nearly dead channel has a vanishing scale.
    """
    largest = 2 ** (bits - 1) - 1
    eps = max(float(weight.detach().abs().max()) * _WEIGHT_EPS, torch.finfo(torch.float32).tiny)
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer.with_args(eps=eps),
        quant_min=-largest,
        quant_max=largest,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def bias_spec(source: Node, layer: Node) -> Any:
    """Return the spec of biases: int32 in units of (activation scale x weight scale).

    That is what an integer kernel adds to its sums.
    """

    def derive(observers: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        (activation, _), (weights, zero_points) = (observer.calculate_qparams() for observer in observers)
        return activation * weights, torch.zeros_like(zero_points)

    return _quantizer.DerivedQuantizationSpec(
        derived_from=[(source, layer), (layer.args[1], layer)],
        derive_qparams_fn=derive,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


def least_weight_scale(bias: torch.Tensor, activation_scale: torch.Tensor) -> torch.Tensor:
    """Return the least scales of weights (C,) with which biases (C,) fit into int32.

    Larger than the weights ask for, in dead channels: these are nearly 0 beside their bias.
    """
    return bias.abs() / (activation_scale * _LARGEST_BIAS)


def range_of_bias(spec: Any, ranges: list[Any]) -> Any:
    """Return the observer of a bias by ``spec``; a derived one reads the observers ``ranges``.

    They are in the order of its ``derived_from``.
    """
    edges = spec.derived_from if isinstance(spec, DerivedSpec) else []
    return _prepare._create_obs_or_fq_from_qspec(spec, dict(zip(edges, ranges, strict=True)), True)


def annotate(node: Node, *, inputs: dict[Node, Any], output: Any | None = None) -> None:
    """Annotate ``inputs`` (producer -> spec) and output of ``node``, beside earlier requests."""
    annotation = node.meta.setdefault(_ANNOTATION_KEY, _quantizer.QuantizationAnnotation(_annotated=True))
    annotation.input_qspec_map.update(inputs)
    if output is not None:
        annotation.output_qspec = output


def annotation_of(node: Node) -> Any:
    """Return the annotation of ``node``, None without one."""
    return node.meta.get(_ANNOTATION_KEY)


def is_annotated(node: Node) -> bool:
    """Return True if ``node`` has an annotation."""
    return _ANNOTATION_KEY in node.meta


def prepare(graph: GraphModule, quantizer: Any, fold: Callable[[GraphModule], None]) -> GraphModule:
    """Insert the observers of ``quantizer``, after ``fold`` has folded batch norms.

    ``graph`` is changed; use the returned one. torchao's own folding is left out.
    """
    fold(graph)
    names = ("_fuse_conv_bn_", "_fuse_linear_bn_")
    before = [getattr(_prepare_convert, name) for name in names]
    try:
        for name in names:
            setattr(_prepare_convert, name, _unchanged)
        prepared: GraphModule = _prepare_pt2e(graph, quantizer)
    finally:
        for name, function in zip(names, before):
            setattr(_prepare_convert, name, function)
    return prepared


def prepare_qat(graph: GraphModule, quantizer: Any, fuse: Callable[[GraphModule], None]) -> GraphModule:
    """Insert the fake quantization of ``quantizer``, after ``fuse`` has fused batch norms.

    torchao's own function of this name fuses them in patterns that set epsilon and momentum to torch's defaults. As after that one, the returned graph
    has the notes of ``graph`` in ``meta``, and its ``train`` and ``eval`` raise NotImplementedError: they would leave batch norms and dropout as
    they are, see `batch_norm.set_training`.
    """
    notes = graph.meta
    scopes = _utils._get_node_name_to_scope(graph)
    graph = quantizer.transform_for_annotation(graph)
    quantizer.annotate(graph)
    quantizer.validate(graph)
    fuse(graph)
    prepared: GraphModule = _prepare.prepare(
        graph, scopes, is_qat=True, obs_or_fq_callback=quantizer.prepare_obs_or_fq_callback
    )
    prepared.meta.update(notes)
    _utils._disallow_eval_train(prepared)
    return prepared


def convert(prepared: GraphModule, *, fold: bool = False, reference: bool = False) -> GraphModule:
    """Replace each observer of ``prepared`` by a quantize and a dequantize (in place).

    Weights stay in float32, see `graphs`; with ``fold`` they become integers under torchao's names. With ``reference``
    torchao rewrites the operators between them to integer arithmetic, if it knows how.
    """
    fold_patterns, trace = _qat_utils._fold_conv_bn_qat_helper, _rewrite._get_aten_graph_module_for_pattern
    _qat_utils._fold_conv_bn_qat_helper, _rewrite._get_aten_graph_module_for_pattern = _unchanged, traced
    try:
        converted: GraphModule = _convert_pt2e(prepared, fold_quantize=fold, use_reference_representation=reference)
    finally:
        _qat_utils._fold_conv_bn_qat_helper, _rewrite._get_aten_graph_module_for_pattern = fold_patterns, trace
    return converted


def traced(pattern: torch.nn.Module, example_inputs: tuple[Any, ...]) -> GraphModule:
    """Trace one of torchao's patterns of integer arithmetic, in place of its own function.

    That one traces by Dynamo, which makes the same graphs in four times the time: seconds for the 24 patterns of a model.
    """
    graph: GraphModule = torch.export.export(pattern, example_inputs, strict=False).module()
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _unchanged(graph: GraphModule, *_: Any, **__: Any) -> GraphModule:
    """Return ``graph``, in place of torchao's folds of batch norms.

    `batch_norm` folds what can be folded; for a batch norm that is left, torchao would trace 192 patterns: 20 s a model.
    """
    return graph
