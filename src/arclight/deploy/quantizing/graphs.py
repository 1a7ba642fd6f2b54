"""Hold captured graphs as modules, read and fold their constants, and pickle them.

`ptq` and `qat` build on `NamedGraphs`, which FSDP gathers as one unit; passes of `quantizing` read constants by `stored_tensor`, and note a
tensor's name under `NAME`; `fold_weights` makes integers of the weights of a converted graph. State-dict names are the float model's: they
must stay. Pickled graphs go to processes of the same version only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._graph_pickler import GraphPickler, Options

from arclight.deploy.capture import quiet
from arclight.deploy.quantizing.pt2e import DEQUANTIZE, QUANTIZE
from arclight.fabric.strategies.root_module import FSDPUnit

NAME = "arclight_name"
"""Key in ``node.meta``: the state-dict name of the tensor that a node stands for, if its target is another."""


class NamedGraphs(FSDPUnit):
    """Module that holds graphs and their tensors, under the model's names.

    A graph is no submodule, so the state dict has each tensor once, without a prefix; moving this module moves what
    its graphs compute with. Subclasses register tensors and then call :meth:`bind`.
    """

    def __init__(self, graphs: Mapping[str, GraphModule]) -> None:
        super().__init__()
        self.graphs = dict(graphs)

    def register_by_name(self, tensors: Mapping[str, Tensor]) -> None:
        """Register parameters and buffers under dotted names, creating plain submodules."""
        for path, value in tensors.items():
            holder: nn.Module = self
            *parents, name = path.split(".")
            for parent in parents:  # not by attribute: a layer may be called like a method or a field of this class
                child = holder._modules.setdefault(parent, nn.Module())
                assert child is not None
                holder = child
            registered: dict[str, Any] = holder._parameters if isinstance(value, nn.Parameter) else holder._buffers
            registered[name] = value

    def bind(self) -> None:
        """Bind the graphs to the tensors and modules that are registered here now."""
        for graph in self.graphs.values():
            for node in graph.graph.nodes:
                if node.op not in ("get_attr", "call_module"):
                    continue
                first = str(node.target).partition(".")[0]
                for kind in ("_modules", "_parameters", "_buffers"):
                    if first in (registered := getattr(self, kind)):
                        getattr(graph, kind)[first] = registered[first]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NamedGraphs:
        super()._apply(fn, recurse)
        self.bind()
        self._move_operators()
        return self

    def _move_operators(self) -> None:
        """Move operators that create tensors (aten.arange) to the registered tensors' device."""
        registered = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
        for graph in self.graphs.values() if registered is not None else ():
            changed = False
            for node in graph.graph.nodes:
                given = [v for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.device)]
                if any(device != registered for device in given):
                    node.args = tuple(registered if isinstance(v, torch.device) else v for v in node.args)
                    node.kwargs = {k: registered if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
                    changed = True
            if changed:
                graph.recompile()

    def __deepcopy__(self, memo: dict[int, Any]) -> NamedGraphs:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about how it copies graphs
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.bind()  # copies of graphs have tensors of their own until then
        return copied


def pickle_graph(graph: GraphModule) -> bytes:
    """Pickle the nodes of a graph without its notes and tensors.

    Tensors are those of the NamedGraphs that runs it. The guards of torch.export, which refuse inputs of other shapes
    in its own words, are code that cannot be pickled, and stay behind.
    """
    with quiet():
        bare = GraphModule(nn.Module(), Graph())
        bare.graph = copy.deepcopy(graph.graph)
        for guards in bare.graph.find_nodes(op="call_module", target="_guards_fn"):
            bare.graph.erase_node(guards)
        nodes_alone = Options(ops_filter=None, node_metadata_key_filter=lambda note: False, ignore_raw_node=True)
        return GraphPickler.dumps(bare, nodes_alone)


def unpickle_graph(pickled: bytes) -> GraphModule:
    """Read what `pickle_graph` has made."""
    with quiet():
        graph = GraphPickler.loads(pickled, FakeTensorMode())
    assert isinstance(graph, GraphModule)
    graph.recompile()
    return graph


def shared_copy(graph: GraphModule) -> GraphModule:
    """Copy ``graph``, sharing its tensors, so that several quantizers can rewrite it."""
    held: dict[int, Any] = {id(tensor): tensor for tensor in (*graph.parameters(), *graph.buffers())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about how it copies graphs
        return copy.deepcopy(graph, held)


def fold_weights(graph: GraphModule) -> dict[str, Tensor]:
    """Store quantized weights of a converted graph as integers; return its tensors by name.

    An integer weight takes the name of the float one, beside ``NAME_scale`` and ``NAME_zero_point``; if something else reads the float one, too, that is
    called ``NAME_1``. torchao's own folding calls them ``_frozen_param0``, ``_scale_0``. The graph is left without tensors: a NamedGraphs binds them.
    """
    tensors: dict[str, Tensor] = {}
    made: set[Node] = set()
    """New nodes that read integers and their scales."""
    sources = constant_sources(graph)
    for node in list(graph.graph.nodes):
        if node.target not in QUANTIZE or (source := sources.get(node)) is None:
            continue
        name = _free_name(_layer_name(source), tensors)
        with torch.no_grad():
            tensors[name] = stored_tensor(graph, node)
        for reader in list(node.users):
            made.add(read := _read(graph, reader, name, like=node))
            reader.replace_input_with(node, read)
            for place, role in ((1, "scale"), (2, "zero_point")):
                value = reader.args[place] if reader.target in DEQUANTIZE else None
                if isinstance(value, Node):
                    tensors[f"{name}_{role}"] = stored_tensor(graph, value)
                    made.add(read := _read(graph, reader, f"{name}_{role}", like=value))
                    reader.update_arg(place, read)
    for node in reversed(graph.graph.nodes):
        if not node.users and (node in sources or node.op == "get_attr"):
            graph.graph.erase_node(node)
    integers, names = set(tensors), dict[str, str]()
    for node in graph.graph.nodes:
        if node.op != "get_attr" or node in made:
            continue
        if (target := str(node.target)) not in names:
            name = _layer_name(node)
            names[target] = _free_name(name, tensors) if name in integers else name
            tensors[names[target]] = stored_tensor(graph, node)
        node.target = names[target]
    called = {str(node.target).partition(".")[0] for node in graph.graph.nodes if node.op == "call_module"}
    graph._parameters.clear()
    graph._buffers.clear()
    for name in set(graph._modules) - called:
        del graph._modules[name]
    graph.recompile()
    return tensors


aten = torch.ops.aten
LAYERS = {
    aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv_transpose1d.default,
    aten.conv_transpose2d.input, aten.conv_transpose3d.input,
}  # fmt: skip


_NUMBERED = {
    aten.conv1d.padding: aten.conv1d.default, aten.conv2d.padding: aten.conv2d.default, aten.conv3d.padding: aten.conv3d.default,
}  # fmt: skip


def number_paddings(graph: GraphModule) -> GraphModule:
    """Write ``padding="same"`` and ``"valid"`` of convolutions in numbers, in place.

    Returns ``graph``.

    Quantizers and runtimes' kernels know convolutions with numbers. Where "same" asks for one row more behind than in front, as with kernels of
    even size, zeros are added before the convolution, as torch does.
    """
    for node in [node for node in graph.graph.nodes if node.target in _NUMBERED]:
        source, weight, *others = node.args
        kernel = (stored_tensor(graph, weight) if weight.op == "get_attr" else weight.meta["val"]).shape[2:]
        defaults: tuple[Any, ...] = (None, [1], "valid", [1], 1)
        bias, stride, padding, dilation, groups = tuple(others) + defaults[len(others) :]
        every = list(dilation) * (len(kernel) // len(dilation))
        total = [step * (size - 1) if padding == "same" else 0 for size, step in zip(kernel, every, strict=True)]
        if any(extent % 2 for extent in total):
            sides = [side for extent in reversed(total) for side in (extent // 2, extent - extent // 2)]
            with graph.graph.inserting_before(node):
                padded = graph.graph.call_function(aten.constant_pad_nd.default, (source, sides))
            padded.meta = {**node.meta, "val": torch.nn.functional.pad(source.meta["val"], sides)}
            source, total = padded, [0] * len(total)
        node.target = _NUMBERED[node.target]
        node.args = (source, weight, bias, stride, [extent // 2 for extent in total], dilation, groups)
    graph.recompile()
    return graph


def fold_layer_weights(graph: GraphModule) -> GraphModule:
    """Fold weights that are computed of stored tensors alone in place, and return ``graph``.

    Quantizers find only weights that are stored, and experts are slices of a stack, weight norm a scaled matrix. Checks of a tensor's type, which
    torch.export adds, are erased: they would count as further readers of the weight, which then could not be quantized.
    """
    for check in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.graph.erase_node(check)
    sources = constant_sources(graph)
    for node in [node for node in graph.graph.nodes if node.target in LAYERS]:
        made = node.args[1]
        if made.op == "get_attr" or made not in sources:
            continue
        origin = sources[made]
        name = f"layer_weight_{len(graph._parameters)}"
        value = stored_tensor(graph, made).detach().contiguous()
        graph.register_parameter(name, nn.Parameter(value, requires_grad=False))
        with graph.graph.inserting_before(made):
            stored = graph.graph.get_attr(name)
        stored.meta = {**made.meta, NAME: str(origin.target)}
        made.replace_all_uses_with(stored)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def constant_sources(graph: GraphModule) -> dict[Node, Node]:
    """Map each node that is computed of stored tensors alone to the first of them.

    What writes into one is left out.
    """
    sources: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node.op == "get_attr" and isinstance(attribute(graph, node), Tensor):
            sources[node] = node
        elif node.op == "call_function" and inputs and not writes and all(source in sources for source in inputs):
            sources[node] = sources[inputs[0]]
    return sources


def tensor_name(node: Node) -> str:
    """Return the name in the model of the tensor that ``node`` reads or, first, is computed of."""
    return str(node.meta.get(NAME, node.target))


def attribute(graph: GraphModule, node: Node) -> Any:
    """Return what a ``get_attr`` node reads: a tensor, or a part of the graph."""
    return attrgetter(str(node.target))(graph)


def stored_tensor(graph: GraphModule, node: Node) -> Tensor:
    """Compute the value of a node that depends on stored tensors alone."""
    if node.op == "get_attr":
        value = attribute(graph, node)
        assert isinstance(value, Tensor)
        return value
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: stored_tensor(graph, source))
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def store_tensor(graph: GraphModule, name: str, value: Tensor, *, like: Node) -> Node:
    """Store a tensor in the place of the one called ``name``; return what reads it.

    It has a new name in the graph, as others may still read the old one.
    """
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    plain = name.replace(".", "_")
    attribute = next(free for i in range(len(used) + 1) if (free := f"folded_{i}_{plain}") not in used)
    graph.register_buffer(attribute, value.detach())
    node = graph.graph.create_node("get_attr", attribute)
    node.meta = {**like.meta, NAME: name}
    return node


def _read(graph: GraphModule, reader: Node, name: str, *, like: Node) -> Node:
    with graph.graph.inserting_before(reader):
        node = graph.graph.create_node("get_attr", name)
    node.meta = dict(like.meta)
    return node


def _layer_name(node: Node) -> str:
    """Return the name of the tensor that ``node`` reads.

    Torchao calls the bias of a folded batch norm ``conv.weight_bias``.
    """
    name = tensor_name(node)
    return f"{name.removesuffix('weight_bias')}bias" if name.endswith(".weight_bias") else name


def _free_name(name: str, taken: Mapping[str, Tensor]) -> str:
    """Return ``name``, or ``name_1``, ..., which is not taken.

    A layer that is applied twice has a bias in units of each place.
    """
    names = (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1)))
    return next(free for free in names if free not in taken)
