"""Split backward in two (zero bubble): gradients of inputs first, those of weights later.

`stage` calls it for schedules that split backward (``I`` and ``W``); `engine` asks which inputs a gradient reaches, and `forecast` counts
what is kept between the halves. The sum of both halves must be the gradients of one backward.

Split as in "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2. Nodes of the graph between outputs and inputs run in the
first half. If weights depend on such a node, its incoming gradients are kept, and the second half starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class _Branch:
    """Weights, and the part of the graph that leads to them only."""

    begins: list[tuple[Node, tuple[Tensor | None, ...]]] = field(default_factory=list)
    """Nodes that continue the first half, and the gradients that arrived there."""
    given: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Outputs of the stage that it computes by itself, and their gradients."""
    weights: list[nn.Parameter] = field(default_factory=list)


class DeferredWeightGradients:
    """The second half of a backward, to be run once."""

    def __init__(self, branches: list[_Branch]) -> None:
        self._branches = branches

    @property
    def kept(self) -> list[Tensor]:
        """Gradients that wait for it."""
        arrived = [x for branch in self._branches for _, gradients in branch.begins for x in gradients]
        return [x for x in arrived if x is not None] + [x for branch in self._branches for _, x in branch.given]

    def run(self) -> None:
        """Add the gradients of the weights to theirs."""
        while self._branches:
            branch = self._branches.pop()
            pairs = list(branch.given)
            for node, gradients in branch.begins:
                pairs += [(GradientEdge(node, i), grad) for i, grad in enumerate(gradients) if grad is not None]
            if pairs:
                edges, arrived = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
                found = torch.autograd.grad(edges, branch.weights, arrived, allow_unused=True)
                accumulate(branch.weights, found)


def inputs_reached(outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> list[bool]:
    """Return for each of ``inputs`` whether a gradient of ``outputs`` reaches it."""
    below = _below([get_gradient_edge(output).node for output in outputs if output.requires_grad])
    return [tensor.requires_grad and get_gradient_edge(tensor).node in below for tensor in inputs]


def accumulate(weights: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Add ``gradients`` to those that ``weights`` have."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient


def backward_of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], DeferredWeightGradients]:
    """Return the gradients of ``inputs``, and the deferred half for ``weights``.

    A gradient is None for an input that the outputs do not depend on.

    All tensors require gradients. A weight that hangs on several places between outputs and inputs (a bias that all layers share) gets
    its gradient here: apart, all that lies between these places would have to run again.
    """
    roots = [get_gradient_edge(output) for output in outputs]
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    wanted = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    below = _below([edge.node for edge in roots])
    between = _leading_to(below, ends)
    early: list[nn.Parameter] = []
    branches: list[_Branch] = []
    handles: list[Any] = []
    for begins, members in _branches(below, between):
        own = [wanted[node] for node in members if node in wanted]
        given = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node in members]
        if not own:
            continue
        if len(begins) + bool(given) > 1:
            early += own
            continue
        branch = _Branch(given=given, weights=own)
        branches.append(branch)
        handles += [node.register_prehook(_keep(branch, node)) for node in begins]
    try:
        found = torch.autograd.grad(
            list(outputs), [*inputs, *early], list(gradients), retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    accumulate(early, found[len(inputs) :])
    return found[: len(inputs)], DeferredWeightGradients(branches)


def _keep(branch: _Branch, node: Node) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        branch.begins.append((node, gradients))

    return hook


_Below = dict[Node, list[Node]]
"""The nodes of a graph, children first, each with its children."""


def _below(roots: list[Node]) -> _Below:
    below: _Below = {}
    children: _Below = {}

    def enter(node: Node) -> tuple[Node, Iterator[Node]]:
        children[node] = [child for child, _ in node.next_functions if child is not None]
        return node, iter(children[node])

    for root in roots:
        stack = [enter(root)] if root not in children else []
        while stack:
            node, rest = stack[-1]
            child = next((child for child in rest if child not in children), None)
            if child is not None:
                stack.append(enter(child))
            else:
                below[node] = children[node]
                stack.pop()
    return below


def _leading_to(below: _Below, ends: set[Node]) -> set[Node]:
    """Return the nodes from which one of ``ends`` is reached, and the ends themselves."""
    found: set[Node] = set()
    for node, children in below.items():
        if node in ends or not found.isdisjoint(children):
            found.add(node)
    return found


def _branches(below: _Below, between: set[Node]) -> list[tuple[list[Node], set[Node]]]:
    """Group what hangs together outside of ``between``, with the nodes on which it hangs."""
    parents: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while (above := parents.setdefault(node, node)) is not node:
            node = above
        return node

    hung: list[tuple[Node, Node]] = []
    for node, children in below.items():
        outside = children if node not in between else [child for child in children if child not in between]
        if node not in between:
            outside = [node, *outside]
        elif outside:
            hung.append((node, outside[0]))
        for child in outside[1:]:
            parents[top(child)] = top(outside[0])
    found: dict[Node, tuple[list[Node], set[Node]]] = {}
    for node in below:
        if node not in between:
            found.setdefault(top(node), ([], set()))[1].add(node)
    for node, child in hung:
        found[top(child)][0].append(node)
    return list(found.values())
