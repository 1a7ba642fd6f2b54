"""Check a quantized graph against expected operators, order, scales and zero points.

`verify_quantizer` calls these for its arguments ``expect``, ``order``, ``mode`` and ``qparams``, and counts by `counts` and `integer_layers`. Each
check returns sentences about what differs; all but `check_mode` raise VerificationError for unknown operators or places.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arclight.deploy.errors import VerificationError
from arclight.deploy.quantizing import pt2e
from arclight.deploy.quantizing.graphs import stored_tensor
from arclight.deploy.quantizing.placement import module_name
from arclight.deploy.verifying.conversion import Mode

Operator = Any
"""An operator such as torch.ops.aten.conv2d.default, or its name; without an overload it stands for all overloads."""
Count = int | tuple[int, int]
"""Expected count of an operator: exact, or (lowest, highest)."""
Qparams = Any
"""Expectation for a place: values by name, a QuantizationSpec of torchao, the place that it shares with, or two places to multiply."""

_FIELDS = ("scale", "zero_point", "dtype", "quant_min", "quant_max")
_RELATIVE = 1e-6
"""Largest relative difference of scales that count as equal: they are computed in float32."""
_CHOOSE = "quantized_decomposed.choose_qparams"


def counts(graph: GraphModule) -> Counter[str]:
    """Count the operators of a graph by name."""
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def check_counts(expect: Mapping[Operator, Count], captured: Counter[str], converted: Counter[str]) -> list[str]:
    """Return the operators whose counts in the converted graph are not as expected.

    Raises VerificationError for unknown operators.
    """
    problems = []
    for wanted, count in expect.items():
        name = _known(wanted, captured, converted, "expect")
        low, high = count if isinstance(count, tuple) else (count, count)
        if not 0 <= low <= high:
            raise VerificationError(f"expect: {name} is expected {count} times: give a number, or (low, high)")
        found = sum(converted[one] for one in converted if _is(one, name))
        if not low <= found <= high:
            expected = str(low) if low == high else f"{low} to {high}"
            problems.append(f"expect: {name} is {found} times in the converted graph, expected {expected}")
    return problems


def check_order(order: Sequence[Operator], captured: Counter[str], converted: GraphModule) -> list[str]:
    """Return the first operator of ``order`` that does not follow the ones before it.

    Others may come between. Raises VerificationError for a single operator, and for unknown ones.
    """
    if len(order) == 1:
        raise VerificationError(f"order: a single operator has no order, got {order[0]}: name at least two")
    counted = counts(converted)
    names = [_known(wanted, captured, counted, "order") for wanted in order]
    rest = iter([str(node.target) for node in converted.graph.nodes if node.op == "call_function"])
    for place, name in enumerate(names):
        if not any(_is(one, name) for one in rest):
            behind = f" behind {', '.join(names[:place])}" if place else ""
            return [f"order: the converted graph has no {name}{behind}"]
    return []


def _known(wanted: Operator, captured: Counter[str], converted: Counter[str], what: str) -> str:
    """Return the name of an operator that is in either graph."""
    name = str(wanted)
    present = captured.keys() | converted.keys()
    if any(_is(one, name) for one in present):
        return name
    near = get_close_matches(name, sorted(present), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise VerificationError(f"{what}: {name} is in neither the captured nor the converted graph{hint}")


def _is(target: str, name: str) -> bool:
    return target == name or target.startswith(f"{name}.")


def check_mode(mode: Mode, converted: GraphModule) -> list[str]:
    """Return contradictions between ``mode`` and how activations are quantized."""
    chosen = [node for node in converted.graph.nodes if str(node.target).startswith(_CHOOSE)]
    rounded = [node for node in converted.graph.nodes if node.target in pt2e.QUANTIZE and not is_stored(node.args[0])]
    fixed = [node for node in rounded if not any(_chosen(value) for value in node.args[1:3])]
    if mode == "weight-only":
        return (
            [f"mode: {len(rounded)} activations are rounded, and mode is 'weight-only': take 'static' or 'dynamic'"]
            if rounded
            else []
        )
    if mode == "dynamic":
        return [] if chosen else ["mode: no range is chosen at run time (choose_qparams), and mode is 'dynamic'"]
    if not fixed:
        return [f"mode: no activation is rounded in a fixed range, and mode is {mode!r}"]
    return []


@dataclass(frozen=True, kw_only=True)
class Place:
    """Scale, zero point and levels of one quantized tensor, the place of a check.

    The first two are None if each call chooses them.
    """

    scale: Tensor | None
    zero_point: Tensor | None
    dtype: torch.dtype
    quant_min: int
    quant_max: int


def check_qparams(graph: GraphModule, qparams: Mapping[str, Qparams]) -> list[str]:
    """Return the places whose scale, zero point or levels are not as expected.

    Raises VerificationError for unknown places.
    """
    problems = []
    for name, wanted in qparams.items():
        found = place(graph, name)
        if isinstance(wanted, str):
            problems += _differences(name, found, _values(place(graph, wanted)), f"those of {wanted}, which it shares")
        elif isinstance(wanted, tuple):
            problems += _derived(graph, name, found, wanted)
        else:
            problems += _differences(name, found, _expected(name, wanted), "as specified")
    return problems


def place(graph: GraphModule, name: str) -> Place:
    """Find the quantization of the tensor ``name``, such as ``conv1.input`` or ``conv1.weight``.

    A name is a module or node, a dot, and input, input0, input1, weight, bias or output. Raises VerificationError if it is unknown, not rounded, or may be
    any of several nodes.
    """
    owner, _, role = name.rpartition(".")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and not _is_quantization(node)]
    named = [node for node in nodes if node.name == owner] or [node for node in nodes if module_name(node) == owner]
    if not named:
        known = {node.name for node in nodes} | {module_name(node) for node in nodes if module_name(node)}
        near = get_close_matches(owner, sorted(known), n=1)
        hint = f"; did you mean {near[0]}.{role}?" if near else ""
        raise VerificationError(f"qparams: {name} names neither a module nor a node of the converted graph{hint}")
    found = {node: at for node in named if (at := _rounding(node, role)) is not None}
    if not found:
        raise VerificationError(
            f"qparams: {name} is not rounded in the converted graph; a place is a module or node, a dot, and input, input0, "
            "input1, weight, bias or output"
        )
    if len(found) > 1:
        raise VerificationError(
            f"qparams: {name} may be any of {[f'{node.name}.{role}' for node in found]}: name one of these nodes"
        )
    return _read(graph, next(iter(found.values())))


def _rounding(node: Node, role: str) -> Node | None:
    """Return the quantize or dequantize operator of one input or output of ``node``."""
    if role == "output":
        return next((user for user in node.users if user.target in pt2e.QUANTIZE), None)
    if role in ("weight", "bias"):
        index = 1 if role == "weight" else 2
        source = node.args[index] if len(node.args) > index else None
        return source if isinstance(source, Node) and source.target in pt2e.DEQUANTIZE else None
    digits = role.removeprefix("input")
    if not role.startswith("input") or not (digits.isdigit() or not digits):
        return None
    sources = [source for source in node.all_input_nodes if not is_stored(source)]
    at = int(digits or 0)
    return sources[at] if at < len(sources) and sources[at].target in pt2e.DEQUANTIZE else None


def _read(graph: GraphModule, node: Node) -> Place:
    scale, zero_point, *rest = node.args[1:]
    if "per_channel" in str(node.target):
        rest = rest[1:]  # the axis
    low, high, dtype = rest

    def value(held: Any) -> Tensor | None:
        if isinstance(held, Node):
            return None if _chosen(held) else stored_tensor(graph, held).double().flatten()
        return torch.tensor([float(held)], dtype=torch.float64)

    assert isinstance(low, int)
    assert isinstance(high, int)
    assert isinstance(dtype, torch.dtype)
    return Place(scale=value(scale), zero_point=value(zero_point), dtype=dtype, quant_min=low, quant_max=high)


def _expected(name: str, wanted: Any) -> dict[str, Any]:
    """Return values by name from a mapping, or from a specification of torchao."""
    if isinstance(wanted, pt2e.FixedSpec | pt2e.QuantizationSpec):
        wanted = {field: value for field in _FIELDS if (value := getattr(wanted, field, None)) is not None}
    if not isinstance(wanted, Mapping) or not wanted or (unknown := set(wanted) - set(_FIELDS)):
        given = f"{sorted(unknown)} of {wanted!r}" if isinstance(wanted, Mapping) and wanted else repr(wanted)
        raise VerificationError(
            f"qparams: {name} is expected to be {given}, which cannot be checked: give any of {', '.join(_FIELDS)}, a "
            "QuantizationSpec or FixedQParamsQuantizationSpec, the name of a place it shares with, or two places to multiply"
        )
    return dict(wanted)


def _values(found: Place) -> dict[str, Any]:
    return {field: value for field in _FIELDS if (value := getattr(found, field)) is not None}


def _differences(name: str, found: Place, wanted: Mapping[str, Any], source: str) -> list[str]:
    problems = []
    for field, value in wanted.items():
        given = getattr(found, field)
        if field in ("scale", "zero_point"):
            expected = torch.as_tensor(value, dtype=torch.float64).flatten()
            tolerance = _RELATIVE if field == "scale" else 0.0
            same = given is not None and _equal(given, expected, tolerance)
            given, value = _shown(given), _shown(expected)
        else:
            same = given == value
        if not same:
            problems.append(f"qparams: {name} has {field} {given}, expected {value}, {source}")
    return problems


def _derived(graph: GraphModule, name: str, found: Place, factors: tuple[Any, ...]) -> list[str]:
    scales = [place(graph, factor).scale for factor in factors]
    if len(scales) != 2 or scales[0] is None or scales[1] is None:
        raise VerificationError(f"qparams: {name} is expected to be a product of two fixed scales, got {factors}")
    wanted = {"scale": scales[0] * scales[1], "zero_point": 0}
    return _differences(name, found, wanted, f"the product of {factors[0]} and {factors[1]}")


def _equal(given: Tensor, expected: Tensor, relative: float) -> bool:
    if len(given) != len(expected) and 1 not in (len(given), len(expected)):
        return False
    return bool(((given - expected).abs() <= relative * expected.abs()).all())


def _shown(value: Tensor | None) -> str:
    if value is None:
        return "chosen by each call"
    return f"{value[0]:.6g}" + (f" (and {len(value) - 1} more)" if len(value) > 1 else "")


def is_stored(value: Any) -> bool:
    """Return True for a node whose value is computed from stored tensors only."""
    if not isinstance(value, Node) or value.op == "placeholder":
        return False
    return value.op == "get_attr" or (bool(value.all_input_nodes) and all(map(is_stored, value.all_input_nodes)))


def _chosen(value: Any) -> bool:
    """Return True for a scale or zero point that is chosen in each call (dynamic quantization)."""
    if not isinstance(value, Node):
        return False
    return str(value.target).startswith(_CHOOSE) or any(_chosen(source) for source in value.all_input_nodes[:1])


def _is_quantization(node: Node) -> bool:
    return (
        node.target in pt2e.QUANTIZE | pt2e.DEQUANTIZE
        or node.target is operator.getitem
        or str(node.target).startswith(_CHOOSE)
    )


def integer_layers(graph: GraphModule) -> list[str]:
    """List nodes that multiply quantized activations by quantized weights.

    Integer kernels can compute these.
    """

    def rounded(value: Any) -> bool:
        return isinstance(value, Node) and value.target in pt2e.DEQUANTIZE

    found: Iterable[Node] = (
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and len(node.args) > 1 and all(map(rounded, node.args[:2]))
    )
    return [node.name for node in found if is_stored(node.args[1])]
