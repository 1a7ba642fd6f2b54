"""Place quantization: decide which tensors of a captured graph become integers.

`ptq` and `qat` make a `PlacementQuantizer`, which torchao calls; other modules take names of layers and checks of ``skip`` from here. A new placement
is a `Profile`. In ONNX Runtime a convolution is fast only if it reads *and* writes integers: so all between two layers with weights stays quantized
(activations, sums, products, pooling, resizing, concatenation). What follows the last such layer (box decoding, softmax, the outputs) stays in
float32, and so do a convolution whose result is only read there, unless it can be written as a matrix product, the activations that it reads, and
the convolution that reads the image. `PROFILES` has what differs in other runtimes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing import pt2e
from arclight.deploy.quantizing.graphs import (
    NAME,
    attribute,
    constant_sources,
    store_tensor,
    stored_tensor,
    tensor_name,
)
from arclight.deploy.quantizing.observers import (
    LeastErrorMovingRange,
    LeastErrorObserver,
    MovingRange,
    PerChannelLeastErrorRange,
    PerChannelWeightRange,
)
from arclight.deploy.settings import Observer, Placement

aten = torch.ops.aten

CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default}
LAYERS = CONVOLUTIONS | {aten.linear.default}
CLIPS = {aten.relu.default, aten.relu6.default, aten.hardtanh.default}
"""Operators that runtimes fold into the rounding of the operator before them."""
ARITHMETIC = {
    aten.add.Tensor, aten.mul.Tensor, aten.sigmoid.default, aten.leaky_relu.default, aten.relu.default,
    aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim,
}  # fmt: skip
"""Operators with an integer kernel in ONNX Runtime, and a range of their own."""
MOVEMENT = {
    aten.cat.default, aten.max_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default,
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.permute.default, aten.transpose.int,
    aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim, aten.dropout.default, aten.clone.default,
}  # fmt: skip
"""Operators that only choose or move values: inputs and output share one scale and zero point."""
ELEMENTWISE = MOVEMENT | {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self, aten.expand.default,
    aten.stack.default, aten.index_select.default, aten.masked_fill.Tensor, aten.copy_.default, aten.maximum.default,
    aten.minimum.default,
}  # fmt: skip
"""Operators that do not count as a layer when they read a stored matrix, see `weighted`."""
POOLING = {aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim}
ACTIVATIONS = {aten.silu.default, aten.hardswish.default, aten.leaky_relu.default, aten.sigmoid.default}
"""Activations that oneDNN and TensorRT compute in float32 before the convolution before them rounds its result."""
STEM_CHANNELS = 4
"""A convolution of fewer input channels, such as one that reads an image, is faster in float32: ONNX Runtime's integer
kernel gathers its input position by position, a few bytes each (YOLOv5n at 320 px: 13 % of the whole model)."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Tensors that a runtime's integer kernels read and write, and operators they fuse."""

    signed: bool = False
    """Activations are signed integers; unsigned ones are faster on x86."""
    zero_point: bool = True
    """Activations have a zero point."""
    integer_bias: bool = True
    """A layer adds an int32 bias; else it takes the float one and rounds that itself."""
    splits_silu: bool = True
    """SiLU runs as an integer sigmoid and an integer product."""
    fuses: frozenset[Any] = frozenset(CLIPS)
    """Operators that a layer before them computes before it rounds its result."""
    arithmetic: frozenset[Any] = frozenset(ARITHMETIC)
    """Operators that have an integer kernel."""
    float_results: bool = False
    """A convolution may write float32, and so run on integers although only float operators read its result."""
    stem_channels: int = 0
    """Fewest input channels of a convolution on integers."""
    float_products: bool = False
    """A 1x1 convolution that may not write float32 is written as a matrix product, which may."""
    integer_results: bool = False
    """A matrix product writes integers, too, whatever reads them."""


PROFILES: Mapping[str, Profile] = {
    "onnxruntime": Profile(stem_channels=STEM_CHANNELS, float_products=True),
    "onednn": Profile(
        splits_silu=False, fuses=frozenset(CLIPS | ACTIVATIONS), arithmetic=frozenset({aten.add.Tensor} | POOLING),
        float_results=True,
    ),
    "xnnpack": Profile(
        signed=True, splits_silu=False, arithmetic=frozenset({aten.add.Tensor, aten.mul.Tensor, aten.relu.default}),
        integer_results=True,
    ),
    "symmetric": Profile(
        signed=True, zero_point=False, integer_bias=False, splits_silu=False, fuses=frozenset(CLIPS | ACTIVATIONS),
        arithmetic=frozenset({aten.add.Tensor} | POOLING), float_results=True,
    ),
}  # fmt: skip
"""Placements by name: of ONNX Runtime; of OpenVINO and inductor, both on oneDNN; of XNNPACK; of TensorRT, without zero points."""


class PlacementQuantizer(pt2e.Quantizer):
    """Quantizer of torchao that places integers as a `Profile` says.

    An object annotates one graph. With ``qat`` it asks for fake quantization. Afterwards ``quantized_layers`` and
    ``float_layers`` name the layers with weights on either side.
    """

    def __init__(
        self,
        *,
        profile: Placement = "onnxruntime",
        observer: Observer = "histogram",
        weight_bits: int = 8,
        activation_bits: int = 8,
        skip: Iterable[str] = (),
        qat: bool = False,
    ) -> None:
        super().__init__()
        if profile not in PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
        self.profile = PROFILES[profile]

        def spec(observer: Any, **options: Any) -> Any:
            signed, zero_point = self.profile.signed, self.profile.zero_point
            return pt2e.activation_spec(observer, activation_bits, signed=signed, zero_point=zero_point, **options)

        # a gate is never cut: its largest values let the largest activations pass
        self.activation = self.before_silu = self.gate = spec(pt2e.MinMaxObserver)
        if observer == "histogram":
            self.activation = spec(LeastErrorObserver)
            self.before_silu = spec(LeastErrorObserver, reader="silu")
        if qat:
            self.gate = spec(MovingRange)
            self.activation = self.before_silu = self.gate
            if activation_bits < 8:
                self.activation = spec(LeastErrorMovingRange)
                self.before_silu = spec(LeastErrorMovingRange, reader="silu")
        self._between = self.profile.fuses | self.profile.arithmetic | MOVEMENT
        self.qat = qat
        self.weight_bits, self.activation_bits = weight_bits, activation_bits
        self.skip = tuple(skip)
        self.quantized_layers: list[str] = []
        self.float_layers: list[str] = []
        self._kept: set[Node] = set()  # in a module that the user keeps in float
        self._stored: dict[Node, Node] = {}  # what is computed of stored tensors alone, and the first of these
        self._before_layer: set[Node] = set()
        self._rounded: set[Node] = set()  # operators without weights that only integer operators read
        self._quantized: dict[Node, Any] = {}  # nodes whose output is quantized, and how

    def transform_for_annotation(self, graph: GraphModule) -> GraphModule:
        """Write operators in others that the runtime has integer kernels for.

        SiLU becomes x * sigmoid(x), and a last 1x1 convolution a matrix product, as the profile says.
        """
        for node in list(graph.graph.nodes) if self.profile.splits_silu else ():
            if node.target is aten.silu.default:
                with graph.graph.inserting_before(node):
                    gate = _like(node, graph.graph.call_function(aten.sigmoid.default, (node.args[0],)))
                    product = _like(node, graph.graph.call_function(aten.mul.Tensor, (node.args[0], gate)))
                node.replace_all_uses_with(product)
                graph.graph.erase_node(node)
        if self.profile.float_products and self.weight_bits >= 7 and self.activation_bits == 8:  # not of few bits
            self._write_last_convolutions_as_products(graph)
        graph.recompile()
        return graph

    def _write_last_convolutions_as_products(self, graph: GraphModule) -> None:
        """Replace 1x1 convolutions that only float operators read by products over channels.

        As convolutions they would stay in float32, and so would the activations before them.
        """
        stored, before, matrices = constant_sources(graph), _before(graph, LAYERS), dict[Node, Node]()
        for node in graph.graph.find_nodes(op="call_function", target=aten.conv2d.default):
            source, weight, *bias = node.args[:3]
            kept = node in before or weight not in stored or inside(module_name(node), self.skip)
            if kept or not _is_pointwise(node) or _input_channels(node) < self.profile.stem_channels:
                continue
            with graph.graph.inserting_before(node):
                if weight not in matrices:
                    matrices[weight] = _as_matrix(graph, weight, tensor_name(stored[weight]), trained=self.qat)
                rows = _call(graph, node, aten.permute.default, source, [0, 2, 3, 1])
                product = _call(graph, node, aten.linear.default, rows, matrices[weight], *bias)
                back = _call(graph, node, aten.permute.default, product, [0, 3, 1, 2])
            node.replace_all_uses_with(back)
            graph.graph.erase_node(node)

    def annotate(self, graph: GraphModule) -> GraphModule:
        check_names(graph, self.skip)
        self._kept = {node for node in graph.graph.nodes if inside(module_name(node), self.skip)}
        self._stored = constant_sources(graph)
        self._before_layer = _before(graph, LAYERS)
        for node in reversed(graph.graph.nodes):
            if node.target in self._between and _readers(node) and all(map(self._integer, _readers(node))):
                self._rounded.add(node)
        for node in list(graph.graph.nodes):
            if node.target in LAYERS and self._integer(node):
                self._annotate_layer(graph, node)
            elif node in self._rounded and node not in self._quantized:
                self._annotate_between(node)
        layers = {node: module_name(node) for node in graph.graph.nodes if node.target in LAYERS}
        self.quantized_layers = [name for node, name in layers.items() if pt2e.is_annotated(node)]
        annotated = {node for node in layers if pt2e.is_annotated(node)}
        self.float_layers = list(dict.fromkeys(name for node, name in weighted(graph) if node not in annotated))
        return graph

    def validate(self, graph: GraphModule) -> None:
        """Check nothing: every annotation above is one that the integer kernels take."""

    def _integer(self, node: Node) -> bool:
        """Return True if ``node`` will read integers."""
        if node in self._kept or not _is_float(node):
            return False
        if node.target not in LAYERS:
            return node in self._rounded
        if node.args[1] not in self._stored:
            return False  # a weight that is computed of inputs has no constant scales
        # A convolution must write integers to run on integers; a matrix product also writes float32.
        return node.target not in CONVOLUTIONS or (
            (node in self._before_layer or self.profile.float_results)
            and _input_channels(node) >= self.profile.stem_channels
        )

    def _annotate_layer(self, graph: GraphModule, node: Node) -> None:
        source, weight, bias = (*node.args, None)[:3]
        assert isinstance(source, Node)
        assert isinstance(weight, Node)
        if weight.op != "get_attr":  # as of weight norm, in training
            weight.meta[NAME] = str(self._stored[weight].target)
        values = stored_tensor(graph, weight)
        options = {}
        if self.qat:
            options["observer"] = PerChannelLeastErrorRange if self.weight_bits < 7 else PerChannelWeightRange
        inputs = {source: self._spec(source), weight: pt2e.weight_spec(values, bits=self.weight_bits, **options)}
        if (
            isinstance(bias, Node) and self.profile.integer_bias and not self.qat
        ):  # there it is rounded when the trained model is converted
            bias = _own(graph, node, bias)
            inputs[bias] = pt2e.bias_spec(source, node)
        pt2e.annotate(node, inputs=inputs)
        # Float sums of many matrix products, the residual stream of a transformer, stay exact.
        readers = _readers(self._tail(node))
        direct = all(user.target in LAYERS and self._integer(user) for user in readers)
        written = not self.profile.float_results or all(map(self._integer, readers))
        if direct or self.profile.integer_results or (node.target in CONVOLUTIONS and written):
            self._annotate_output(node)

    def _annotate_between(self, node: Node) -> None:
        """Annotate an operator without weights that reads quantized tensors."""
        sources = _activations(node)
        if not any(source in self._quantized for source in sources):
            return
        if node.target in MOVEMENT:
            self._annotate_movement(node, sources)
        elif node.target in self.profile.arithmetic:
            pt2e.annotate(node, inputs={source: self._spec(source) for source in sources})
            self._annotate_output(node)

    def _annotate_movement(self, node: Node, sources: list[Node]) -> None:
        first, *others = sources
        shared = pt2e.SharedSpec((first, node))
        pt2e.annotate(node, inputs={first: self._spec(first), **dict.fromkeys(others, shared)}, output=shared)
        self._quantized[node] = self.activation

    def _annotate_output(self, node: Node) -> None:
        tail = self._tail(node)
        spec = self.gate if node.target is aten.sigmoid.default else self.activation
        self._quantized[tail] = self.before_silu if _read_by_silu(tail) else spec
        pt2e.annotate(tail, inputs={}, output=self._quantized[tail])

    def _spec(self, source: Node) -> Any:
        """Return the specification in which a reader sees ``source``: that of its writer."""
        return self._quantized.get(source, self.activation)

    def _tail(self, node: Node) -> Node:
        """Return the batch norm and clip (ReLU, ReLU6) that alone read ``node``, else ``node``."""
        readers = _readers(node)
        if self.qat and len(readers) == 1 and readers[0].target is aten.batch_norm.default:
            return self._tail(readers[0])
        fused = len(readers) == 1 and readers[0].target in self.profile.fuses and readers[0] not in self._kept
        return readers[0] if fused else node


def module_name(node: Node) -> str:
    """Name of the module that ``node`` was written in ("" for the model itself)."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    name: str = list(stack.values())[-1][0]
    return name


def weighted(graph: GraphModule) -> list[tuple[Node, str]]:
    """List operators that multiply by a stored matrix, and their layers, of any kind.

    Tables that are only added or multiplied, such as positions, are no layers. An operator outside of any module is
    named after its matrix.
    """
    matrices: dict[
        Node, str
    ] = {}  # nodes that depend on stored tensors alone, and the name of the first matrix in them
    found: list[tuple[Node, str]] = []
    for node in graph.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in matrices]
        if node.op == "get_attr":
            value = attribute(graph, node)
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.is_floating_point():
                matrices[node] = str(node.target)
        elif sources and len(sources) == len(node.all_input_nodes):
            matrices[node] = matrices[sources[0]]
        elif sources and node.op == "call_function" and node.target not in ELEMENTWISE:
            found.append((node, module_name(node) or matrices[sources[0]]))
    return found


def stored_weights(graph: GraphModule) -> dict[str, bool]:
    """Return, by layer, whether its weight is computed of stored tensors alone."""
    stored = constant_sources(graph)
    return {module_name(node): node.args[1] in stored for node in graph.graph.nodes if node.target in LAYERS}


def _like(node: Node, new: Node, **notes: Any) -> Node:
    """Return ``new`` with the notes of ``node``, but for ``notes``."""
    new.meta = {**node.meta, **notes}
    return new


def _call(graph: GraphModule, like: Node, target: Any, *args: Any) -> Node:
    """Create a call of an operator in the module of ``like``, with the shape that it returns."""
    shapes = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    return _like(like, graph.graph.call_function(target, args), val=target(*shapes))


def _as_matrix(graph: GraphModule, weight: Node, name: str, *, trained: bool) -> Node:
    """Return the weight (out, in, 1, 1) of a convolution as a matrix (out, in).

    In training it is computed of the weight, else stored under its name.
    """
    shape = list(weight.meta["val"].shape[:2])
    if trained:
        return _call(graph, weight, aten.view.default, weight, shape)
    matrix = store_tensor(graph, name, stored_tensor(graph, weight).view(shape), like=weight)
    matrix.meta["val"] = weight.meta["val"].view(shape)
    return matrix


def _is_pointwise(convolution: Node) -> bool:
    """Return True for a convolution of kernel 1 x 1 that reads each position once."""
    defaults = (None, [1, 1], [0, 0], [1, 1], 1)
    arguments: tuple[Any, ...] = (*convolution.args[1:], *defaults[len(convolution.args) - 2 :])
    weight, _, stride, padding, _, groups = arguments
    one = tuple(weight.meta["val"].shape[2:]) == (1, 1)
    return one and groups == 1 and all(step == 1 for step in stride) and all(zeros == 0 for zeros in padding)


def _read_by_silu(node: Node) -> bool:
    """Return True if nothing but SiLU, x * sigmoid(x), reads ``node``."""
    readers = _readers(node)
    if [reader.target for reader in readers] == [aten.silu.default]:
        return True
    gates = [reader for reader in readers if reader.target is aten.sigmoid.default]
    products = [reader for reader in readers if reader.target is aten.mul.Tensor]
    return len(readers) == 2 and len(gates) == 1 == len(products) and set(products[0].args[:2]) == {node, gates[0]}


def _readers(node: Node) -> list[Node]:
    """Return the users of the values of ``node``; asking for its size does not count."""
    return [user for user in node.users if user.target is not aten.sym_size.int]


def _own(graph: GraphModule, layer: Node, bias: Node) -> Node:
    """Return the bias as a node of ``layer`` alone.

    Layers that share a bias each hold it in units of their own.
    """
    if len(bias.users) == 1:
        return bias
    with graph.graph.inserting_before(layer):
        own = _like(bias, graph.graph.get_attr(str(bias.target)))
    layer.update_arg(2, own)
    return own


def _before(graph: GraphModule, targets: set[Any]) -> set[Node]:
    """Return the nodes whose value reaches an operator in ``targets``."""
    found: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if any(user.target in targets or user in found for user in node.users):
            found.add(node)
    return found


def _input_channels(convolution: Node) -> int:
    return int(convolution.args[0].meta["val"].shape[1])  # type: ignore[union-attr]


def _is_float(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == torch.float32


def _activations(node: Node) -> list[Node]:
    """Return the float tensors that ``node`` reads, or none if it also reads a constant.

    Each comes once. Runtimes have no integer kernels for sums and products with plain numbers or parameters.
    """
    floats = [source for source in node.all_input_nodes if _is_float(source)]
    binary = node.target in (aten.add.Tensor, aten.mul.Tensor)
    if any(source.op == "get_attr" for source in floats) or (binary and not all(map(_is_node, node.args[:2]))):
        return []
    return floats


def _is_node(value: object) -> bool:
    return isinstance(value, Node)


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def check_names(graph: GraphModule, skip: tuple[str, ...]) -> None:
    """Raise QuantizeError for a name in ``skip`` in which the graph computes nothing."""
    names = {str(path) for node in graph.graph.nodes for path, _ in node.meta.get("nn_module_stack", {}).values()}
    check_skip(skip, names, "the model computes nothing in a module of that name")


def check_skip(skip: tuple[str, ...], names: Collection[str], otherwise: str) -> None:
    """Raise QuantizeError for a name in ``skip`` that is not among ``names`` of modules.

    otherwise: what the error says of it.
    """
    for prefix in skip:
        if not prefix:
            raise QuantizeError("skip names '', which is the whole model: name modules of it, or leave skip out")
        if not any(inside(name, (prefix,)) for name in names):
            near = get_close_matches(prefix, sorted(names), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise QuantizeError(f"skip names {prefix!r}, but {otherwise}{hint}")
