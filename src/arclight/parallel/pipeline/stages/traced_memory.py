"""Which tensors of a traced graph lie in the same memory, and which operations write there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

_UNDECLARED = frozenset({"running_mean", "running_var"})
"""Arguments that operations write to although their signatures do not say so."""


class Memory:
    """Sets of nodes that may share memory, each known by one of its nodes, the root."""

    def __init__(self, order: Iterable[Node], parts: Mapping[str, nn.Module]) -> None:
        """order: operations as they run. parts: graphs within the graph, by the names under which it has them."""
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
        """Operations that write to where a node's tensor lies, or look at it with strides of their own."""
        return tuple(self._writers.get(self.root(node), ()))


def targets(node: Node, parts: Mapping[str, nn.Module]) -> Iterator[Any]:
    """What an operation calls: itself, and all that the graphs within it do."""
    yield node.target
    for part in _within(node, parts):
        for inner in part.graph.nodes:
            if inner.op == "call_function":
                yield from targets(inner, dict(part.named_children()))


def _within(node: Node, parts: Mapping[str, nn.Module]) -> list[fx.GraphModule]:
    names = [str(before.target) for before in node.all_input_nodes if before.op == "get_attr"]
    return [part for name in names if isinstance(part := parts.get(name), fx.GraphModule)]


def _arguments(node: Node, parts: Mapping[str, nn.Module]) -> Iterator[tuple[Node, bool, bool]]:
    """Each tensor that goes into an operation: whether a result may be a view of it, and whether it is written to."""
    schema = getattr(node.target, "_schema", None)
    within = _within(node, parts)
    if within:
        yield from _arguments_of_part(node, within, parts)
    elif schema is None:  # a part of a result
        yield from ((before, True, False) for before in node.all_input_nodes)
    else:
        perhaps = "dropout" in str(node.target)  # gives its input back where it drops nothing
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
    """Of a graph within the graph, as it does with what it is given; of several (branches), as any might."""
    given = [before for before in node.all_input_nodes if before.op != "get_attr"]
    part = within[0]
    doors = [inner for inner in part.graph.nodes if inner.op == "placeholder"]
    passed = [value for value in node.args if isinstance(value, Node) and value.op != "get_attr"]
    if len(within) > 1 or len(doors) != len(passed):
        writes = any(_writes(target) for target in targets(node, parts))
        yield from ((before, True, writes) for before in given)
        return
    order = [inner for inner in part.graph.nodes if inner.op == "call_function"]
    memory = Memory(order, dict(part.named_children()))
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
