"""Group a traced graph into calls: each operation that uses a parameter starts one.

`traced_stage` calls `find_calls`. The same graph must give the same calls on every rank.

What depends on inputs alone (masks, positions) is in no call: each stage that needs it computes it again, as where modules are
sliced. Between two such operations calls are parted where least crosses. What no cut can pass through (a tensor that is written
to later on, a size that depends on values) is within one call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from arclight.parallel.pipeline.call_graph import Call, CallGraph, Value
from arclight.parallel.pipeline.splitting.traced.export_graph import ExportedGraph
from arclight.parallel.plan import PlanError

_UNDECLARED = frozenset({"running_mean", "running_var"})
"""Arguments that operations write to although their signatures do not say so."""


class GraphMemory:
    """Sets of nodes that may share memory, each known by one of its nodes, the root."""

    def __init__(self, order: Iterable[Node], parts: Mapping[str, nn.Module]) -> None:
        """Analyse the memory of operations.

        order: operations as they run. parts: graphs within the graph, by the names under which it has them.
        """
        self._above: dict[Node, Node] = {}
        self._writers: dict[Node, list[Node]] = {}
        writes: list[tuple[Node, Node]] = []
        for node in order:
            for before, shares, write in _arguments(node, parts):
                if shares:
                    self._above[self.root(before)] = self.root(node)
                if write:
                    writes.append((before, node))
        for before, node in writes:
            self._writers.setdefault(self.root(before), []).append(node)

    def root(self, node: Node) -> Node:
        while node in self._above and self._above[node] is not node:
            node = self._above[node]
        return node

    def writers(self, node: Node) -> tuple[Node, ...]:
        """Return the operations that write to a node's memory, or view it with other strides."""
        return tuple(self._writers.get(self.root(node), ()))


def targets(node: Node, parts: Mapping[str, nn.Module]) -> Iterator[Any]:
    """Yield the targets of an operation: itself, and those of the graphs within it."""
    yield node.target
    for part in _within(node, parts):
        for inner in part.graph.nodes:
            if inner.op == "call_function":
                yield from targets(inner, dict(part.named_children()))


def _within(node: Node, parts: Mapping[str, nn.Module]) -> list[fx.GraphModule]:
    names = [str(before.target) for before in node.all_input_nodes if before.op == "get_attr"]
    return [part for name in names if isinstance(part := parts.get(name), fx.GraphModule)]


def _arguments(node: Node, parts: Mapping[str, nn.Module]) -> Iterator[tuple[Node, bool, bool]]:
    """Yield each tensor argument of an operation, if it is aliased, and if it is written to.

    Aliased: a result may be a view of it.
    """
    schema = getattr(node.target, "_schema", None)
    within = _within(node, parts)
    if within:
        yield from _arguments_of_part(node, within, parts)
    elif schema is None:  # a part of a result
        yield from ((before, True, False) for before in node.all_input_nodes)
    else:
        perhaps = "dropout" in str(node.target)  # gives its input back if it drops nothing
        strided = "as_strided" in str(node.target)
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [(argument, node.kwargs.get(argument.name)) for argument in schema.arguments]
        for number, (argument, value) in enumerate(given):
            info = argument.alias_info
            write = (info is not None and info.is_write) or argument.name in _UNDECLARED or strided
            for before in _nodes_in(value):
                yield before, info is not None or (perhaps and number == 0), write


def _arguments_of_part(
    node: Node, within: list[fx.GraphModule], parts: Mapping[str, nn.Module]
) -> Iterator[tuple[Node, bool, bool]]:
    """Yield the arguments of a graph within the graph, as it uses them.

    Of several (branches), they are used as any might.
    """
    given = [before for before in node.all_input_nodes if before.op != "get_attr"]
    part = within[0]
    doors = [inner for inner in part.graph.nodes if inner.op == "placeholder"]
    passed = [value for value in node.args if isinstance(value, Node) and value.op != "get_attr"]
    if len(within) > 1 or len(doors) != len(passed):
        writes = any(_writes(target) for target in targets(node, parts))
        yield from ((before, True, writes) for before in given)
        return
    order = [inner for inner in part.graph.nodes if inner.op == "call_function"]
    memory = GraphMemory(order, dict(part.named_children()))
    (output,) = (inner for inner in part.graph.nodes if inner.op == "output")
    roots = {memory.root(leaf) for leaf in _nodes_in(output.args)}
    for door, before in zip(doors, passed, strict=True):
        yield before, memory.root(door) in roots, bool(memory.writers(door))


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        (a.alias_info is not None and a.alias_info.is_write) or a.name in _UNDECLARED for a in schema.arguments
    )


def _nodes_in(value: Any) -> list[Node]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Node)]


_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv", "embedding")
"""Operations to which a buffer may be what a parameter is otherwise (weights that are frozen or quantized)."""


@dataclass(frozen=True)
class TracedCalls:
    """Map operations of a traced graph to calls."""

    graph: CallGraph
    members: tuple[tuple[Node, ...], ...]
    """Nodes of each call, in order."""
    glue: tuple[Node, ...]
    """What is in no call, in order."""
    written: dict[Node, tuple[Node, ...]]
    """Nodes that write in place to each node outside of calls, or to the tensor that it views."""
    nodes: dict[Value, Node]
    inside: dict[str, str]
    """Names of modules that begin within a call, and why."""


def find_calls(exported: ExportedGraph) -> TracedCalls:
    """Return the calls of a traced graph.

    Raises PlanError if an input or a constant is written to, or no parameter is used.
    """
    order = list(_operations(exported.graph))
    memory = GraphMemory(order, exported.parts)
    _refuse_writes(exported, memory)
    own = _own(exported, order, memory)
    spine = [node for node in order if node in own]
    anchors = [i for i, node in enumerate(spine) if _weights(exported, node)]
    if not anchors:
        raise PlanError(f"{exported.frame.name} uses no parameter in its forward, so there is nothing to cut")
    bytes_at, forbidden = _crossing(exported, spine), _forbidden(exported, spine, memory)
    begins, inside = [0], dict[str, str]()
    for before, anchor in itertools.pairwise(anchors):
        free = [at for at in range(before + 1, anchor + 1) if at not in forbidden]
        if free:
            begins.append(min(free, key=lambda at: (bytes_at[at], _depth(spine[at - 1], spine[at]), -at)))
        else:
            inside[_name(exported, spine[anchor])] = forbidden[anchor]
    ranges = list(itertools.pairwise([*begins, len(spine)]))
    members = tuple(tuple(spine[begin:end]) for begin, end in ranges)
    names = [_name(exported, next(n for n in part if _weights(exported, n))) for part in members]
    graph, nodes = _unit_graph(exported, members, names)
    glue = tuple(node for node in order if node not in own)
    written = {node: writers for node in glue if (writers := memory.writers(node))}
    return TracedCalls(graph, members, glue, written, nodes, inside)


def _operations(graph: fx.Graph) -> Iterator[Node]:
    """Yield the operations of the graph, in order, with parts of a result directly after it.

    Checks of fixed values are left out.
    """
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr") or "_assert_tensor_metadata" in str(node.target):
            continue
        if node.target is not operator.getitem:
            waiting = [node]
            while waiting:
                found = waiting.pop(0)
                yield found
                waiting = [user for user in found.users if user.target is operator.getitem] + waiting


def _unit_graph(
    exported: ExportedGraph, members: Sequence[Sequence[Node]], names: Sequence[str]
) -> tuple[CallGraph, dict[Value, Node]]:
    call_of = {node: number for number, part in enumerate(members) for node in part}
    results = {leaf for leaf in exported.results if isinstance(leaf, Node)}
    values: dict[Node, Value] = {}
    sizes: list[list[int]] = [[] for _ in members]
    for node, number in call_of.items():
        leaves = any(call_of.get(user, number) != number for user in node.users) or node in results
        if leaves and isinstance(node.meta.get("val"), Tensor):
            values[node] = Value(number, len(sizes[number]))
            sizes[number].append(_bytes(node))
    calls = []
    for number, part in enumerate(members):
        used = [node for member in part for node in member.all_input_nodes]
        reads = frozenset(values[node] for node in used if call_of.get(node, number) != number)
        parameters = dict.fromkeys(exported.states[node] for node in used if node in exported.parameters)
        calls.append(Call(names[number], tuple(parameters), reads, tuple(sizes[number])))
    result = frozenset(values[node] for node in results if node in values)
    loose = dict.fromkeys(exported.states[node] for node in exported.results if node in exported.parameters)
    graph = CallGraph(tuple(calls), result, tuple(loose), aliases=exported.aliases)
    return graph, {value: node for node, value in values.items()}


# -- what belongs to calls -------------------------------------------------------------------------------------------


def _own(exported: ExportedGraph, order: Sequence[Node], memory: GraphMemory) -> set[Node]:
    """Return the operations that belong to calls.

    They depend on parameters, draw random numbers or change a buffer.
    """
    weighty = {node for node in exported.states if node in exported.persistent}
    for node in order:
        if any(before in weighty for before in node.all_input_nodes):
            weighty.add(node)
    changes = {node for state in exported.states for node in memory.writers(state)}
    own: set[Node] = set()
    for node in order:
        product = any(kind in str(node.target) for kind in _PRODUCTS)
        if (
            _weights(exported, node)
            or _random(exported, node)
            or node in changes
            or (product and any(before in weighty for before in node.all_input_nodes))
        ):
            own.add(node)
    count = -1
    while count != len(own):
        count = len(own)
        for node in order:
            if any(before in own for before in node.all_input_nodes):
                own.add(node)
        roots = {memory.root(node) for node in own if memory.writers(node)}
        own.update(node for node in order if memory.root(node) in roots)
    return own


def _weights(exported: ExportedGraph, node: Node) -> bool:
    """Return True for operations that use a parameter, or a buffer in the place of one."""
    product = any(kind in str(node.target) for kind in _PRODUCTS)
    return any(
        before in exported.parameters or (product and before in exported.persistent) for before in node.all_input_nodes
    )


def _random(exported: ExportedGraph, node: Node) -> bool:
    tags = (getattr(target, "tags", ()) for target in targets(node, exported.parts))
    return any(torch.Tag.nondeterministic_seeded in found for found in tags)


def _refuse_writes(exported: ExportedGraph, memory: GraphMemory) -> None:
    for given in (*exported.inputs, *exported.constants):
        for node in memory.writers(given):
            if "as_strided" not in str(node.target):
                raise PlanError(
                    f"{exported.frame.name} writes to {given.name}, which each stage recomputes{_line(node)}: write to a "
                    "clone of it"
                )


# -- where calls may be parted ---------------------------------------------------------------------------------------


def _last_uses(exported: ExportedGraph, spine: Sequence[Node]) -> list[int]:
    places = {node: at for at, node in enumerate(spine)}
    results = {leaf for leaf in exported.results if isinstance(leaf, Node)}
    return [len(spine) if n in results else max((places[u] for u in n.users if u in places), default=-1) for n in spine]


def _crossing(exported: ExportedGraph, spine: Sequence[Node]) -> list[int]:
    """Return the bytes that cross a cut before each operation."""
    steps = [0] * (len(spine) + 2)
    for at, (node, last) in enumerate(zip(spine, _last_uses(exported, spine), strict=True)):
        if last > at:
            steps[at + 1] += _bytes(node)
            steps[last + 1] -= _bytes(node)
    return list(itertools.accumulate(steps))


def _forbidden(exported: ExportedGraph, spine: Sequence[Node], memory: GraphMemory) -> dict[int, str]:
    """Return the operations before which no stage can begin, and why."""
    found: dict[int, str] = {}
    for at, (node, last) in enumerate(zip(spine, _last_uses(exported, spine), strict=True)):
        if not _fixed(node):
            found |= dict.fromkeys(range(at + 1, last + 1), f"the size of a tensor depends on values{_line(node)}")
    places: dict[Node, list[int]] = {}
    for at, node in enumerate(spine):
        places.setdefault(memory.root(node), []).append(at)
        for before in node.all_input_nodes:
            if before in exported.states and memory.writers(before):
                places.setdefault(memory.root(before), []).append(at)
    states = {memory.root(node) for node in exported.states}
    for root, ats in places.items():
        if writers := memory.writers(root):
            end = max(at for at in ats if root in states or spine[at] in writers or at == ats[0])
            found |= dict.fromkeys(range(min(ats) + 1, end + 1), f"a tensor is written to in place{_line(writers[-1])}")
    return found


def _fixed(node: Node) -> bool:
    """Return True for operations that give a tensor of known size."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) and _fixed(node) else 0


def _path(node: Node) -> list[str]:
    """Return the modules in whose forward an operation lies, the outermost first.

    Calls of one module are numbered.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack)[1:]


def _depth(before: Node, after: Node) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(_path(before), _path(after), strict=False))
    return len(list(same))


def _name(exported: ExportedGraph, node: Node) -> str:
    """Name the module in which an operation lies; its parameter, if that is the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    inner = list(stack.values())[-1][0].split("@")[0] if stack else ""
    states = [exported.states[before] for before in node.all_input_nodes if before in exported.states]
    return inner or states[0]


def _line(node: Node) -> str:
    """Return ``" (model.py:12: h += x)"``, if the trace knows it."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    if len(trace) < 2:
        return ""
    place = trace[-2].strip().removeprefix('File "').replace('", line ', ":").split(", in ")[0]
    return f" ({place.rsplit('/', 1)[-1]}: {trace[-1].strip()})"
