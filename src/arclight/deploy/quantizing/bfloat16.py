"""Round a captured graph's layers to bfloat16: weights at once, inputs at each call.

`ptq` calls `round_layers` for the recipe ``BFloat16``; ``formats.onnx_graph`` writes the operator `ROUND` as Identity, since OpenVINO then computes
in bfloat16 by itself. Only `LAYERS` are rounded here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing.graphs import NAME, stored_tensor
from arclight.deploy.quantizing.placement import module_name, weighted

aten = torch.ops.aten
LAYERS = {
    aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
}  # fmt: skip

_LIBRARY = torch.library.Library("arclight", "FRAGMENT")
_LIBRARY.define("round_bfloat16(Tensor x) -> Tensor")


def round_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16, and return the values in the type of ``x``."""
    return x.to(torch.bfloat16).to(x.dtype, copy=True)


_LIBRARY.impl("round_bfloat16", round_bfloat16, "CompositeExplicitAutograd")
torch.library.register_fake("arclight::round_bfloat16", torch.empty_like, lib=_LIBRARY)
ROUND = torch.ops.arclight.round_bfloat16.default


def round_layers(graph: GraphModule) -> tuple[list[str], list[str]]:
    """Round linear layers and convolutions of ``graph``; return rounded and other layers.

    It is done in place, and layers are returned by name. A weight that an embedding reads as well is rounded for both.
    """
    layers = [node for node in graph.graph.nodes if node.target in LAYERS and _weight(node) is not None]
    if not layers:
        raise QuantizeError(
            "the model has no linear layer and no convolution, the only layers that are faster in bfloat16"
        )
    names = {node: module_name(node) or str(node.args[1]) for node in layers}
    left = list(dict.fromkeys(name for node, name in weighted(graph) if node not in names))
    held: dict[int, str] = {}
    for node in layers:
        weight = _weight(node)
        if weight is not None:
            _store(graph, weight, held)
        source = node.args[0]
        assert isinstance(source, Node)
        with graph.graph.inserting_before(node):
            rounded = graph.graph.call_function(ROUND, (source,))
        rounded.meta = dict(source.meta)
        node.update_arg(0, rounded)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return list(dict.fromkeys(names.values())), left


def _weight(node: Node) -> Node | None:
    weight = node.args[1]
    return weight if isinstance(weight, Node) and weight.op == "get_attr" else None


def _store(graph: GraphModule, weight: Node, held: dict[int, str]) -> None:
    """Store ``weight`` in bfloat16 for its readers, once per weight."""
    values = stored_tensor(graph, weight)
    name = held.setdefault(values.data_ptr(), f"bfloat16_{len(held)}")
    if name not in graph._buffers:
        graph.register_buffer(name, values.detach().to(torch.bfloat16))
    with graph.graph.inserting_after(weight):
        stored = graph.graph.get_attr(name)
    stored.meta[NAME] = str(weight.target)
    with graph.graph.inserting_after(stored):
        widened = graph.graph.call_function(aten._to_copy.default, (stored,), {"dtype": torch.float32})
    widened.meta = dict(weight.meta)
    weight.replace_all_uses_with(widened)
