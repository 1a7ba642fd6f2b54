"""Measure each layer's rounding noise; keep the fewest layers in float for a score.

`ptq` calls both for a quantized model whose score drops by more than ``max_drop``. A converted graph comes in before its weights are folded;
`noise_by_layer` runs it once for each layer, with that layer alone rounded, and `search` bisects over the layers in that order, noisiest first. Keys
of `Search.to_json` are in programs: they must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from arclight.deploy.capture import Inputs, as_outputs
from arclight.deploy.parity import Parts, compare, worst
from arclight.deploy.quantizing.linear import DYNAMIC, FLOAT_WEIGHT, GROUPED
from arclight.deploy.quantizing.placement import CONVOLUTIONS, LAYERS, module_name
from arclight.deploy.quantizing.pt2e import DEQUANTIZE, QUANTIZE

EVALUATIONS = 16
"""Most scores that are computed for one search, those of the float and of the fully quantized model among them."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One quantized form of a model that was scored."""

    float_layers: int
    """Layers that were kept in float, counted from the most sensitive one."""
    score: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """The fewest layers in float with which a model keeps its score, and how they were found."""

    sensitivity: Mapping[str, float]
    """Layers, the most sensitive first, and the ratio of the noisiest output (decibels) if that layer alone is rounded."""
    kept: tuple[str, ...]
    """Layers that were kept in float for the score."""
    evaluations: tuple[Evaluation, ...]
    """Quantized forms that were scored, in that order."""

    def to_json(self) -> dict[str, Any]:
        """Return the search for a program's metadata.

        A layer whose rounding changes nothing has no ratio.
        """
        return {
            "kept": list(self.kept),
            "evaluations": [[one.float_layers, one.score] for one in self.evaluations],
            "sensitivity_db": {
                name: None if ratio == float("inf") else ratio for name, ratio in self.sensitivity.items()
            },
        }


class PartialRounding(torch.fx.Interpreter):
    """Interpreter of a converted graph in which only the layers in ``rounding`` round.

    Weights are not folded yet.
    """

    def __init__(self, graph: GraphModule, layers: Collection[str]) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.rounding: frozenset[str] = frozenset()
        self._layers = _layers_of(graph, layers)

    def run_node(self, n: Node) -> Any:
        if n in self._layers and not self._layers[n] & self.rounding:
            source, *_ = self.fetch_args_kwargs_from_env(n)[0]
            if n.target in (DYNAMIC, GROUPED):
                bias = n.args[3]
                weight = self.fetch_attr(n.meta[FLOAT_WEIGHT])
                return F.linear(source, weight, self.env[bias] if isinstance(bias, Node) else None)
            return source
        return super().run_node(n)


def _layers_of(graph: GraphModule, layers: Collection[str]) -> dict[Node, frozenset[str]]:
    """Map each operator that rounds to the layers among ``layers`` that need it.

    A layer needs its inputs and weights rounded; a convolution also its result, and what integer operators compute of that, since only a matrix
    product may write float32. A result of one that is rounded though no layer reads it is its own, as for XNNPACK.
    """
    nodes = list(graph.graph.nodes)
    named = {n: frozenset({module_name(n)} & set(layers)) for n in nodes if n.target in LAYERS | {DYNAMIC, GROUPED}}
    written = _written(nodes, named, {node: named[node] for node in named if node.target in CONVOLUTIONS})
    by_any = _written(nodes, named, named)
    read: dict[Node, frozenset[str]] = {}
    for node in reversed(nodes):
        read[node] = frozenset().union(*(named[user] if user in named else read[user] for user in node.users))
    found = {node: named[node] for node in named if node.target in (DYNAMIC, GROUPED)}
    for node in nodes:
        if node.target in QUANTIZE:
            found[node] = written[node] | read[node] or by_any[node]
        elif node.target in DEQUANTIZE and node.args[0] in found:
            found[node] = found[node.args[0]]
    return found


def _written(
    nodes: Sequence[Node], layers: Collection[Node], writers: Mapping[Node, frozenset[str]]
) -> dict[Node, frozenset[str]]:
    """Map each node to the names of ``writers`` whose result it is, or what is computed of it.

    Those of ``layers`` that are no writers end the way.
    """
    written: dict[Node, frozenset[str]] = {}
    for node in nodes:
        sources = node.all_input_nodes
        if node in layers:
            written[node] = writers.get(node, frozenset())
        elif node.target in QUANTIZE | DEQUANTIZE:
            written[node] = written[sources[0]]
        elif all(source.target in DEQUANTIZE for source in sources) or (len(sources) == 1 and sources[0] in layers):
            written[node] = frozenset().union(*(written[source] for source in sources))
        else:
            written[node] = frozenset()
    return written


@torch.no_grad()
def noise_by_layer(
    graph: GraphModule, layers: Sequence[str], inputs: Inputs, parts: Parts | None = None
) -> dict[str, float]:
    """Return the noisiest output's SNR in dB for each layer rounded alone, the least first.

    ``graph``: converted, weights not folded. The reference is the same graph without rounding. Outputs are judged one by one, or
    the tensors that ``parts`` takes out of them.
    """
    run = PartialRounding(graph, layers)
    exact = as_outputs(run.run(*inputs))
    found = {}
    for layer in dict.fromkeys(layers):
        run.rounding = frozenset({layer})
        found[layer] = worst(list(compare(exact, as_outputs(run.run(*inputs)), parts).values())).sqnr_db
    return dict(sorted(found.items(), key=lambda item: item[1]))


def fewest(count: int, fits: Callable[[int], bool], most: int) -> int | None:
    """Return the least number below ``count`` that ``fits``, by bisection; None without one.

    It is called at most ``most`` times, so that the number may not be the least. If one number fits, larger ones should; 0 is known not to.
    """
    low, high = 0, count
    while high - low > 1 and most > 0:
        middle = (low + high) // 2
        most -= 1
        if fits(middle):
            high = middle
        else:
            low = middle
    return high if high < count else None


def search(
    sensitivity: Mapping[str, float], score: Callable[[tuple[str, ...]], float], least: float, first: float
) -> Search | None:
    """Find the fewest float layers for a score of ``least``; None if all but one are too few.

    Layers are those in ``sensitivity``, in its order. ``score`` takes layers to keep in float; ``first`` is the score without any. That and the
    float model's score are two of the `EVALUATIONS`.
    """
    order = tuple(sensitivity)
    evaluations = [Evaluation(float_layers=0, score=first)]

    def fits(kept: int) -> bool:
        evaluations.append(Evaluation(float_layers=kept, score=score(order[:kept])))
        return evaluations[-1].score >= least

    found = fewest(len(order), fits, EVALUATIONS - 2)
    if found is None:
        return None
    return Search(sensitivity=sensitivity, kept=order[:found], evaluations=tuple(evaluations))
