"""Fuse batch norms into layers for quantization-aware training, and fold them after it.

Weights are rounded as the program rounds them: scaled by what the batch norm does to each channel. `qat` calls `fuse` when it prepares a graph,
`use_batch_statistics` while it trains, `insert_bias_range` to round biases and `fold` when it converts, and reads `TRAINING`, `FUSABLE` and the notes
`SCALED` and `BIAS`; `ptq` calls `fold_untrained`; ``verifying.conversion`` calls these and `set_training` for other quantizers, and reads `SCALED`.

Epsilon, momentum and dropout must come out unchanged, as ``verifying`` checks by `literals`: torchao's own passes reset them to 1e-5, 0.1 and
0.5, and an epsilon of 1e-3 beside small variances then costs 30 dB. Here the operators stay, so that their numbers are not written again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing import pt2e
from arclight.deploy.quantizing.graphs import NAME, constant_sources, store_tensor, stored_tensor, tensor_name

aten = torch.ops.aten

FUSED = "arclight_fused_layer"
"""Key in ``node.meta`` of the division before a batch norm: the name of the layer into which the scale was moved.

It is not in the batch norm's, in whose place torchao's own switch of modes puts another node.
"""
SCALED = "arclight_scaled_weight"
"""Key in a scaled weight's ``node.meta``: the name of the parameter."""
BIAS = "arclight_bias_spec"
"""Key in a layer's ``node.meta``: the annotation of its bias, and the arguments from which its range derives."""
TRAINED = "arclight_trained"
"""Key in a batch norm's ``node.meta``: whether it was captured in training mode."""
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
FUSABLE = TRANSPOSED | {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.linear.default, aten.conv1d.padding, aten.conv2d.padding,
    aten.conv3d.padding,
}  # fmt: skip
DROPOUT = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
TRAINING, EPSILON = 5, 7
"""Positions of arguments of aten.batch_norm."""


def fuse(graph: GraphModule) -> None:
    """Fuse batch norms: scale the weights of their layers, and undo it before the batch norm.

    Only layers that the batch norm alone reads are fused. conv(x, w * s) / s + b, with s = gamma / sqrt(running
    variance + epsilon), is conv(x, w) + b until w * s is rounded. Annotations follow: what was asked for the weight is
    asked for the scaled one. A bias is added in float32; what was asked for it is heeded when the batch norm is folded
    into it.
    """
    stored = constant_sources(graph)
    for norm in list(graph.graph.nodes):
        layer = _layer_before(norm, stored)
        annotation = None if layer is None else pt2e.annotation_of(layer)
        if layer is not None and annotation is not None and layer.args[1] in annotation.input_qspec_map:
            _fuse(graph, layer, norm)
    graph.recompile()


def _layer_before(norm: Node, stored: Collection[Node], *, affine: bool = True) -> Node | None:
    """Return the layer that ``norm`` alone reads, and whose own weights it can be folded into.

    stored: what is computed of stored tensors alone. affine: whether it must have a scale and an offset.
    """
    if norm.target is not aten.batch_norm.default:
        return None
    layer = norm.args[0]
    read = [
        (arg is None and not affine and place < 2) or (isinstance(arg, Node) and arg.op == "get_attr")
        for place, arg in enumerate(norm.args[1:5])
    ]
    fits = (
        isinstance(layer, Node)
        and layer.target in FUSABLE
        and len(layer.users) == 1
        and all(read)
        and all(arg in stored or _was_folded(arg) for arg in layer.args[1:3] if arg is not None)
    )
    if not fits:
        return None
    assert isinstance(layer, Node)
    grouped = layer.target in TRANSPOSED and (layer.args[6] if len(layer.args) > 6 else 1) != 1
    flat = layer.target is aten.linear.default and layer.meta["val"].dim() != 2  # channels are not the last dimension
    return None if grouped or flat else layer


def _was_folded(arg: object) -> bool:
    """Return True for a tensor that `_fold` stored for another batch norm."""
    return isinstance(arg, Node) and arg.op == "get_attr" and arg.meta.get(NAME) is not None


def _fuse(graph: GraphModule, layer: Node, norm: Node) -> None:
    new = graph.graph
    weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    assert isinstance(weight, Node)
    dims = stored_tensor(graph, weight).dim()
    channels = 1 if layer.target in TRANSPOSED else 0
    weight_shape = [-1 if d == channels else 1 for d in range(dims)]
    value_shape = [-1 if d == 1 else 1 for d in range(layer.meta["val"].dim())]
    with new.inserting_before(layer):
        scale = _scale(new, norm)
        scaled = new.call_function(
            aten.mul.Tensor, (weight, new.call_function(aten.view.default, (scale, weight_shape)))
        )
    scaled.meta = {**weight.meta, "val": weight.meta.get("val"), SCALED: tensor_name(weight)}
    _move_annotations(new, layer, weight, scaled, bias)
    layer.args = (layer.args[0], scaled, None, *layer.args[3:])
    with new.inserting_before(norm):
        value = new.call_function(aten.div.Tensor, (layer, new.call_function(aten.view.default, (scale, value_shape))))
        value.meta[FUSED] = layer.name
        if bias is not None:
            value = new.call_function(
                aten.add.Tensor, (value, new.call_function(aten.view.default, (bias, value_shape)))
            )
    norm.update_arg(0, value)


def _scale(new: Graph, norm: Node) -> Node:
    """Return gamma / sqrt(running variance + epsilon), or 1 for a gamma of 0.

    What it divides must be finite.
    """
    _, gamma, _, _, variance = norm.args[:5]
    std = new.call_function(aten.sqrt.default, (new.call_function(aten.add.Scalar, (variance, norm.args[EPSILON])),))
    scale = new.call_function(aten.div.Tensor, (gamma, std))
    zero = new.call_function(aten.eq.Scalar, (gamma, 0))
    return new.call_function(aten.where.ScalarSelf, (zero, 1.0, scale))


def _move_annotations(new: Graph, layer: Node, weight: Node, scaled: Node, bias: Any) -> None:
    annotation = pt2e.annotation_of(layer)
    specs = annotation.input_qspec_map
    asked = specs.get(bias)
    if asked is not None and (isinstance(asked, pt2e.SharedSpec) or not asked.dtype.is_floating_point):
        layer.meta[BIAS] = (asked, _sources_of(asked, layer))
    annotation.input_qspec_map = {
        scaled if source is weight else source: spec for source, spec in specs.items() if source is not bias
    }
    for node in new.nodes:  # others may share the weight's range, or derive theirs from it
        if (other := pt2e.annotation_of(node)) is not None:
            moved = {(weight, layer): (scaled, layer)}
            other.input_qspec_map = {source: _moved(spec, moved) for source, spec in other.input_qspec_map.items()}
            other.output_qspec = _moved(other.output_qspec, moved)


def _sources_of(spec: Any, layer: Node) -> tuple[int, ...]:
    """Return the arguments of the layer from whose ranges the bias's range derives.

    Raises QuantizeError for others.
    """
    if isinstance(spec, pt2e.SharedSpec):
        raise QuantizeError(
            f"the bias of {layer.name} cannot share a range: it is folded with its batch norm; derive it"
        )
    edges = spec.derived_from if isinstance(spec, pt2e.DerivedSpec) else []
    if any(edge not in [(layer.args[0], layer), (layer.args[1], layer)] for edge in edges):
        raise QuantizeError(
            f"the range of the bias of {layer.name} can only derive from those of the layer's input and weight"
        )
    return tuple([layer.args[0], layer.args[1]].index(source) for source, _ in edges)


def _moved(spec: Any, edges: dict[Any, Any]) -> Any:
    if isinstance(spec, pt2e.SharedSpec) and spec.edge_or_node in edges:
        return pt2e.SharedSpec(edges[spec.edge_or_node])
    if isinstance(spec, pt2e.DerivedSpec):
        return replace(spec, derived_from=[edges.get(edge, edge) for edge in spec.derived_from])
    return spec


def fold_untrained(graph: GraphModule) -> None:
    """Fold batch norms of a graph in evaluation mode, before observers are inserted.

    A layer whose result something else reads as well is left alone, and layers that share a weight get one each; torchao's folding changes what these
    compute.
    """
    for norm in graph.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        _compose(graph, norm)
    stored = constant_sources(graph)
    for norm in list(graph.graph.nodes):
        layer = _layer_before(norm, stored, affine=False)
        if layer is not None and not norm.args[TRAINING]:
            weight, bias = (*layer.args, None)[1:3]
            _fold(graph, layer, norm, weight, weight, bias)  # type: ignore[arg-type]
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _compose(graph: GraphModule, norm: Node) -> None:
    """Replace a functional graph's batch norm, which has three results, by one with one."""
    *tensors, momentum, epsilon = norm.args
    with graph.graph.inserting_before(norm):
        whole = graph.graph.call_function(aten.batch_norm.default, (*tensors, False, momentum, epsilon, False))
    for result in list(norm.users):
        if result.args[1] == 0:
            whole.meta = dict(result.meta)
            result.replace_all_uses_with(whole)
        graph.graph.erase_node(result)  # the others are statistics of a batch, of which there are none
    graph.graph.erase_node(norm)


def fold(graph: GraphModule) -> None:
    """Fold batch norms of a trained graph, fused or not, into layers' weights and biases.

    Batch norms that use running statistics no longer count batches, those that are left in the graph neither.
    """
    layers = {node.name: node for node in graph.graph.nodes}
    stored = constant_sources(graph)
    for norm in list(graph.graph.nodes):
        if (name := _fused_before(norm)) is not None:
            layer = layers[name]
            rounded = layer.args[1]
            assert isinstance(rounded, Node)
            scaled = rounded.args[0] if rounded.op == "call_module" else rounded
            assert isinstance(scaled, Node)
            _fold(graph, layer, norm, scaled.args[0], scaled, _bias_before(norm))  # type: ignore[arg-type]
            if BIAS in layer.meta:
                _round_bias(graph, layer)
        elif (plain := _layer_before(norm, stored)) is not None:
            weight, bias = (*plain.args, None)[1:3]
            _fold(graph, plain, norm, weight, weight, bias)  # type: ignore[arg-type]
    _erase_counters(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _erase_counters(graph: GraphModule) -> None:
    """Erase counts of batches, except those of batch norms that use the batch's statistics.

    They write into a buffer, so nothing takes them for dead code.
    """
    norms = graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    moving = {str(norm.args[3].target).rpartition(".")[0] for norm in norms if norm.args[TRAINING] and norm.args[3]}
    for node in graph.graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        if _is_counter(node) and str(node.args[0].target).rpartition(".")[0] not in moving:
            graph.graph.erase_node(node)


def _is_counter(node: Node) -> bool:
    """Return True for the addition by which a batch norm in training mode counts batches."""
    return node.target is aten.add_.Tensor and str(node.args[0].target).endswith("num_batches_tracked")  # type: ignore[union-attr]


def _fold(graph: GraphModule, layer: Node, norm: Node, weight: Node, scaled: Node, bias: Node | None) -> None:
    """Fold ``norm`` into ``weight`` and ``bias`` of ``layer``, whose argument is ``scaled``."""
    gamma, beta, mean, variance = (
        stored_tensor(graph, node) if isinstance(node, Node) else None for node in norm.args[1:5]
    )
    assert mean is not None
    assert variance is not None
    old_bias = None if bias is None else stored_tensor(graph, bias)
    new_weight, new_bias = fuse_conv_bn_weights(
        stored_tensor(graph, weight), old_bias, mean, variance,
        float(norm.args[EPSILON]), gamma, beta, transpose=layer.target in TRANSPOSED,  # type: ignore[arg-type]
    )  # fmt: skip
    name = tensor_name(weight)
    prefix = name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]
    first = layer.args[1] if layer.args[1] is not scaled else layer
    with graph.graph.inserting_before(first):  # type: ignore[arg-type]
        read_weight = store_tensor(graph, name, new_weight, like=weight)
        read_bias = store_tensor(graph, f"{prefix}.bias" if prefix else "bias", new_bias, like=bias or weight)
    rounded = read_weight if layer.args[1] is scaled else layer.args[1]
    if isinstance(rounded, Node) and rounded is not read_weight:
        rounded.replace_input_with(scaled, read_weight)
    layer.args = (layer.args[0], rounded, read_bias, *layer.args[3:])
    norm.replace_all_uses_with(layer)
    if "val" in norm.meta:
        layer.meta["val"] = norm.meta["val"]
    graph.graph.erase_node(norm)


def _round_bias(graph: GraphModule, layer: Node) -> None:
    """Insert the range that was asked for the bias of a layer whose batch norm is folded."""
    spec, places = layer.meta[BIAS]
    bias = layer.args[2]
    assert isinstance(bias, Node)
    sources = [layer.args[place] for place in places]
    ranges = [graph.get_submodule(str(source.target)) for source in sources]
    observer = pt2e.range_of_bias(spec, ranges)
    observer(stored_tensor(graph, bias))
    insert_bias_range(graph, layer, observer)


def insert_bias_range(graph: GraphModule, layer: Node, observer: torch.nn.Module) -> None:
    """Insert ``observer`` between ``layer`` and its bias."""
    bias = layer.args[2]
    assert isinstance(bias, Node)
    name = f"bias_range_{layer.name}"
    graph.add_submodule(name, observer)
    with graph.graph.inserting_before(layer):
        rounded = graph.graph.call_module(name, (bias,))
    rounded.meta = dict(bias.meta)
    layer.update_arg(2, rounded)


def _fused_before(norm: Node) -> str | None:
    """Return the name of the layer that has the scale of batch norm ``norm``, else None."""
    if norm.target is not aten.batch_norm.default:
        return None
    value = norm.args[0]
    if isinstance(value, Node) and value.target is aten.add.Tensor:
        value = value.args[0]
    return value.meta.get(FUSED) if isinstance(value, Node) else None


def _bias_before(norm: Node) -> Node | None:
    value = norm.args[0]
    assert isinstance(value, Node)
    if value.target is not aten.add.Tensor:
        return None
    shaped = value.args[1]
    assert isinstance(shaped, Node)
    bias = shaped.args[0]
    assert isinstance(bias, Node)
    return bias


def use_batch_statistics(graph: GraphModule, enabled: bool) -> None:
    """Set batch norms captured in training mode to use the batch's or running statistics."""
    for node in graph.graph.nodes:
        if node.target is aten.batch_norm.default and node.meta.setdefault(TRAINED, node.args[TRAINING]):
            node.update_arg(TRAINING, enabled)
        if _is_counter(node):
            node.update_arg(1, 1 if enabled else 0)
    graph.recompile()


def set_training(graph: GraphModule, training: bool) -> None:
    """Set batch norms and dropout of a graph captured in training mode to train or evaluate.

    Nothing else of them is written; torchao's own switch sets epsilon, momentum and the probability of dropout, too.
    """
    for node in graph.graph.nodes:
        if node.target in DROPOUT:
            node.update_arg(2, training)
    use_batch_statistics(graph, training)


def literals(graph: GraphModule) -> dict[str, tuple[float, ...]]:
    """Return (momentum, epsilon) of each batch norm, and (p,) of each dropout.

    Keys are the name of the running mean, and the dropout's place.
    """
    found: dict[str, tuple[float, ...]] = {}
    dropouts = 0
    for node in graph.graph.nodes:
        if node.target is aten.batch_norm.default:
            found[str(node.args[3].target)] = (float(node.args[6]), float(node.args[EPSILON]))
        elif node.target in DROPOUT:
            found[f"dropout {dropouts}"] = (float(node.args[1]),)
            dropouts += 1
    return found
