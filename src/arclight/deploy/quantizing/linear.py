"""Quantize a graph's linear layers without calibration: weights in groups, or 8 bits.

`ptq` calls `quantize_linears` for `DynamicInt8`, `WeightOnly` and `LowBit` with 8-bit activations; `rounded_linear` rounds in training by the same
functions. Each layer becomes one operator, which ``formats.onnx_graph`` writes for its kernel in ONNX Runtime: rounding must stay that of the kernel.
With 4-bit weights and float32 activations the kernel multiplies in float32. With 8-bit weights that kernel takes eight times as long as float32 does,
so activations are rounded, too: to 8 bits, with a scale for each group of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arclight.deploy.errors import QuantizeError
from arclight.deploy.quantizing.graphs import NAME, stored_tensor
from arclight.deploy.quantizing.placement import check_names, inside, module_name, weighted
from arclight.deploy.settings import DynamicInt8, LowBit, WeightOnly

aten = torch.ops.aten
FLOAT_WEIGHT = "arclight_float_weight"
"""Key in an operator's ``node.meta``: the name of the float weight that it stands for."""

_LIBRARY = torch.library.Library("arclight", "FRAGMENT")
_LIBRARY.define("linear_dynamic(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
_LIBRARY.define("linear_grouped(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int bits, bool integer) -> Tensor")

LEVELS = 255
"""Steps from the smallest to the largest value of a dynamic range, in unsigned 8 bits."""
LARGEST = 127
"""Largest 8-bit integer of a range that is symmetric around 0."""
SHRINK = torch.linspace(1.0, 0.75, 11)
"""Shares of a group's widest 4-bit range that `pack` tries: to cut off the extremes may cost less than coarser steps."""


def linear_dynamic(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in 8 bits, with this tensor's range, as ONNX's DynamicQuantizeLinear.

    x: (..., K); weight: (N, K) int8; scale: (N,) of each output; all samples of a batch share the range.
    """
    wide = torch.promote_types(x.dtype, torch.float32)  # sums of products of integers are no float16
    with torch.autocast(x.device.type, enabled=False):
        rounded, unit = _dynamic(x.to(wide))
        product: Tensor = rounded @ weight.to(wide).T * (unit * scale)
        return (product if bias is None else product + bias).to(x.dtype)


def round_dynamic(x: Tensor) -> Tensor:
    """Round activations to 8 bits in the range of this very tensor, and return the real values."""
    rounded, unit = _dynamic(x)
    return rounded * unit


def _dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` as whole numbers of steps from zero, and the size of a step."""
    if not x.numel():  # no sample, and so no range
        return x, x.new_ones(())
    low, high = (value.float() for value in x.aminmax())
    low, high = low.clamp(max=0), high.clamp(min=0)
    unit = (high - low) / LEVELS
    unit = torch.where(unit > 0, unit, 1.0)
    zero_point = (-low / unit).clamp(0, LEVELS).round()
    return ((x / unit).round() + zero_point).clamp(0, LEVELS) - zero_point, unit


def linear_grouped(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, bits: int, integer: bool
) -> Tensor:  # fmt: skip
    """Multiply by grouped integers of ``bits``, as ONNX Runtime's MatMulNBits.

    x: (..., K); weight: (N, groups, bytes) uint8, two 4-bit values in a byte; scale: (N, groups). With ``integer``
    activations are rounded to 8 bits, group by group.
    """
    x = round_groups(x, weight.shape[1]) if integer else x
    return torch.nn.functional.linear(x, unpack(weight, scale, bits).to(x.dtype), bias)


def round_groups(x: Tensor, groups: int) -> Tensor:
    """Round activations (..., K) to 8 bits in ``groups``, and return the real values."""
    grouped = x.unflatten(-1, (groups, -1))
    unit = grouped.abs().amax(-1, keepdim=True) / LARGEST
    unit = torch.where(unit > 0, unit, 1.0)
    rounded: Tensor = ((grouped / unit).round() * unit).flatten(-2)
    return rounded


def _shape_of_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


for _function in (linear_dynamic, linear_grouped):
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"arclight::{_function.__name__}", _shape_of_linear, lib=_LIBRARY)

DYNAMIC = torch.ops.arclight.linear_dynamic.default
GROUPED = torch.ops.arclight.linear_grouped.default


def quantize_linears(
    graph: GraphModule, recipe: DynamicInt8 | WeightOnly | LowBit, trained: Collection[str] | None = None
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Replace linear layers of ``graph`` in place by operators with packed weights.

    Returns the names of the replaced layers, and of the layers of any kind that stay in float. A weight that something else reads as well, such as a
    tied embedding, stays in float everywhere. ``trained``: modules that were trained with rounding; all others stay in float. Raises QuantizeError
    for one of these that computes something else in the graph.
    """
    if trained is None:
        check_names(graph, recipe.skip)
    weights = _weights(graph, lambda name: not inside(name, recipe.skip) if trained is None else _own(name) in trained)
    if trained is not None:
        found = {_own(module_name(node)) for nodes in weights.values() for node in nodes}
        computed = {_own(module_name(node)) for node in graph.graph.nodes}
        if lost := [name for name in trained if name in computed and name not in found]:
            raise QuantizeError(
                f"{', '.join(lost)} were trained with rounding, and what the program computes with their weights is no linear layer of their own: "
                "keep them in float with skip"
            )
    quantized = {
        node: module_name(node) or str(weight.meta.get(NAME, weight.target))
        for weight, nodes in weights.items()
        for node in nodes
    }
    left = list(dict.fromkeys(name for node, name in weighted(graph) if node not in quantized))
    if not quantized:
        raise QuantizeError(
            f"{type(recipe).__name__} is for linear layers, and the model has none whose weight is its own and not in skip; these "
            f"stay in float: {left}. Convolutions run on integers by Int8, with calibration data"
        )
    if not isinstance(recipe, DynamicInt8):
        sizes = {quantized[nodes[0]]: int(weight.meta["val"].shape[1]) for weight, nodes in weights.items()}
        check_groups(sizes, recipe.group_size)
    for place, (weight, nodes) in enumerate(weights.items()):
        _replace(graph, weight, nodes, recipe, place)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return list(dict.fromkeys(quantized.values())), left


def pack(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Pack ``weight`` (N, K) in groups: integers (N, groups, bytes) uint8, and scales.

    Scales are (N, groups). A group's value of largest magnitude is the most negative integer, of which there is one
    more than of positive ones.
    """
    largest = 2 ** (bits - 1)
    groups = weight.float().unflatten(1, (-1, group_size))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.empty_like(extreme), torch.full_like(extreme, torch.inf)
    for share in SHRINK if bits == 4 else SHRINK[:1]:
        scale = torch.where(extreme == 0, 1.0, extreme * share / -largest)
        error = ((groups / scale).round().clamp(-largest, largest - 1) * scale - groups).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    integers = ((groups / best).round().clamp(-largest, largest - 1) + largest).to(torch.uint8)
    if bits == 4:
        integers = integers[..., 0::2] | (integers[..., 1::2] << 4)
    return integers.contiguous(), best.squeeze(-1)


def unpack(integers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the weight (N, K) that packed integers and their scales stand for."""
    if bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], -1).flatten(-2)
    weight: Tensor = ((integers.float() - 2 ** (bits - 1)) * scale[..., None]).flatten(1)
    return weight


def _own(name: str) -> str:
    """Return the name of a module without the number that torch.export adds to repeated calls."""
    return re.sub(r"@\d+", "", name)


def weight_bits(recipe: WeightOnly | LowBit) -> tuple[int, bool]:
    """Return the bits of a weight, and whether activations are rounded to 8 bits, too."""
    return (recipe.bits, recipe.bits == 8) if isinstance(recipe, WeightOnly) else (4, True)


def dynamic_weight(weight: Tensor, *, reduced: bool) -> tuple[Tensor, Tensor]:
    """Round ``weight`` (N, K) to 8 bits, or to 7 if ``reduced``.

    Returns the integers (N, K) int8 and a scale (N,) for each output.
    """
    values = weight.float()
    scale = values.abs().amax(1) / (LARGEST // 2 if reduced else LARGEST)
    scale = torch.where(scale > 0, scale, 1.0)
    return (values / scale[:, None]).round().to(torch.int8), scale


def _weights(graph: GraphModule, chosen: Callable[[str], bool]) -> dict[Node, list[Node]]:
    """Map each weight that only linear layers read to these layers.

    All of them must be in modules that are ``chosen`` by name.
    """
    reads: dict[int, list[Node]] = {}  # a tied parameter may be read under several names
    for node in graph.graph.find_nodes(op="get_attr"):
        reads.setdefault(stored_tensor(graph, node).data_ptr(), []).append(node)
    found: dict[Node, list[Node]] = {}
    for nodes in reads.values():
        readers = [(node, reader) for node in nodes for reader in node.users]
        own = (reader.target is aten.linear.default and reader.args[1] is node for node, reader in readers)
        if readers and all(own) and all(chosen(module_name(reader)) for _, reader in readers):
            found[nodes[0]] = [reader for _, reader in readers]
    return found


def check_groups(inputs: Mapping[str, int], size: int) -> None:
    """Raise QuantizeError if groups of ``size`` do not divide the inputs of a layer, by name."""
    if wrong := {name: count for name, count in inputs.items() if count % size}:
        fits = [other for other in WeightOnly.GROUP_SIZES if not any(count % other for count in inputs.values())]
        way = f"take group_size={fits[-1]}" if fits else "keep these layers in float with skip"
        raise QuantizeError(
            f"group_size={size} does not divide the inputs of {', '.join(f'{n} ({c})' for n, c in wrong.items())}: {way}"
        )


def _replace(
    graph: GraphModule, weight: Node, nodes: list[Node], recipe: DynamicInt8 | WeightOnly | LowBit, place: int
) -> None:  # fmt: skip
    values = stored_tensor(graph, weight).detach()
    settings: tuple[Any, ...] = ()
    if isinstance(recipe, DynamicInt8):
        tensors = dynamic_weight(values, reduced=bool(recipe.reduce_range))
    else:
        bits, integer = weight_bits(recipe)
        tensors, settings = pack(values, bits, recipe.group_size), (bits, integer)
    names = []
    for role, tensor in zip(("", "_scale"), tensors):
        names.append(f"quantized_{place}{role}")
        graph.register_buffer(names[-1], tensor)
    for node in nodes:
        with graph.graph.inserting_before(node):
            read = [graph.graph.get_attr(name) for name in names]
            for get, role in zip(read, ("", "_scale")):
                get.meta[NAME] = f"{weight.target}{role}"
            bias = node.args[2] if len(node.args) > 2 else None
            target = DYNAMIC if isinstance(recipe, DynamicInt8) else GROUPED
            new = graph.graph.call_function(target, (node.args[0], *read, bias, *settings))
        new.meta = {**node.meta, FLOAT_WEIGHT: str(weight.target)}
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
