"""Compute a quantized graph again in float64, by rules of its own, and record what single operators compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from arclight.deploy.capture import Inputs, as_outputs
from arclight.deploy.errors import QuantizeError
from arclight.deploy.parity import Parity, compare
from arclight.deploy.quantizing.placement import module_name

NAMESPACES = ("quantized_decomposed.", "torchao.")
"""Beginnings of the names of operators that quantize."""


def _round(x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> Tensor:
    """Return the integers, as float64: round half to even, then shift, then clamp."""
    rounded: Tensor = ((x / scale).round() + zero_point).clamp(low, high)
    return rounded


def _along(value: Any, axis: int, dims: int) -> Tensor:
    """Shape a number for each channel so that it stands along ``axis``."""
    shape = [1] * dims
    shape[axis] = -1
    return torch.as_tensor(value).double().reshape(shape)


def _number(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def quantize_per_tensor(x: Tensor, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Round to ``low`` .. ``high``, which ``dtype`` must hold."""
    _check_levels(low, high, dtype)
    return _round(x, _number(scale), _number(zero_point), low, high)


def dequantize_per_tensor(q: Tensor, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype, **_: Any) -> Tensor:  # fmt: skip
    """Return what integers stand for."""
    _check_levels(low, high, dtype)
    result: Tensor = (q.double() - _number(zero_point)) * _number(scale)
    return result


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Round with a scale for each index of dimension ``axis``."""
    _check_levels(low, high, dtype)
    return _round(x, _along(scales, axis, x.dim()), _along(zero_points, axis, x.dim()), low, high)


def dequantize_per_channel(
    q: Tensor, scales: Tensor, zero_points: Tensor | None, axis: int, low: int, high: int, dtype: torch.dtype, **_: Any
) -> Tensor:
    """Return what integers stand for, with a scale for each index of dimension ``axis``."""
    _check_levels(low, high, dtype)
    zero = 0.0 if zero_points is None else _along(zero_points, axis, q.dim())
    return (q.double() - zero) * _along(scales, axis, q.dim())


def choose_qparams(x: Tensor, low: int, high: int, eps: float, _: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of the range of ``x`` with 0 in it."""
    least, most = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((most - least) / (high - low)).clamp(min=eps)
    return scale.reshape(1), (low - (least / scale).round()).clamp(low, high).reshape(1)


def choose_qparams_symmetric(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale of a range with 0 in its middle, and that middle."""
    scale = (x.abs().max() / ((high - low) / 2)).clamp(min=eps)
    return scale.reshape(1), torch.full((1,), 128.0 if dtype == torch.uint8 else 0.0, dtype=torch.float64)


RULES: Mapping[str, Callable[..., Any]] = {
    "quantize_per_tensor": quantize_per_tensor,
    "dequantize_per_tensor": dequantize_per_tensor,
    "quantize_per_channel": quantize_per_channel,
    "dequantize_per_channel": dequantize_per_channel,
    "choose_qparams": choose_qparams,
    "choose_qparams_symmetric": choose_qparams_symmetric,
}
"""Operators of quantized_decomposed, without their overloads."""


def _check_levels(low: int, high: int, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        raise QuantizeError(f"a quantize operator rounds to {dtype}, which is not judged: there are rules for integers")
    held = torch.iinfo(dtype)
    if not held.min <= low < high <= held.max:
        raise QuantizeError(f"a quantize operator rounds to {low} .. {high}, which {dtype} does not hold")


class Float64(Interpreter):
    """Run a graph of quantize, dequantize and float operators in float64, integers exactly.

    What quantizes follows the rules above; every other operator is torch's, on float64. Raises QuantizeError for a
    quantizing operator without a rule.
    """

    def run(self, *inputs: Any, **options: Any) -> Any:
        with torch.no_grad():
            return super().run(*map(_widened, inputs), **options)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _widened(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if name.startswith(NAMESPACES):
            rule = RULES.get(name.partition(".")[2].partition(".")[0])
            if rule is None or not name.startswith(NAMESPACES[0]):
                raise QuantizeError(f"{name} cannot be judged: there is a float64 rule for {sorted(RULES)}")
            return rule(*args, **kwargs)
        if target is operator.getitem:
            return super().call_function(target, args, kwargs)
        args, kwargs = torch.utils._pytree.tree_map(_widened, (args, kwargs))
        return torch.utils._pytree.tree_map(_widened, super().call_function(target, args, kwargs))


def _widened(value: Any) -> Any:
    """Return a float tensor as float64, and float64 for the name of a narrower type."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class _Recorder(Interpreter):
    """Run a graph and keep the values of some nodes."""

    def __init__(self, graph: GraphModule, names: Collection[str]) -> None:
        super().__init__(graph)
        self.names = names
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, Tensor):
            self.values[n.name] = value
        return value


def compare_nodes(twin: GraphModule, program: GraphModule, inputs: Inputs) -> dict[str, Parity]:
    """Compare each operator of ``program`` with the one of its name in ``twin``, errors before it included.

    The keys are names of nodes with the module that each was written in: "conv2d_1 (backbone.stem)".
    """
    targets = {node.name: node for node in twin.graph.nodes if node.op == "call_function"}
    shared = {
        node.name: f"{node.name} ({module_name(node) or 'the model itself'})"
        for node in program.graph.nodes
        if node.name in targets and node.target is targets[node.name].target
    }
    recorders = [_Recorder(graph, shared) for graph in (twin, program)]
    with torch.no_grad():
        for recorder in recorders:
            recorder.run(*inputs)
    wanted, given = (recorder.values for recorder in recorders)
    return {
        shared[name]: compare([value], [given[name]])["0"]
        for name, value in wanted.items()
        if value.is_floating_point() and name in given and not value.isnan().any() and value.isfinite().any()
    }


def judge(program: GraphModule, inputs: Inputs) -> list[Tensor]:
    """Compute the outputs of ``program`` in float64."""
    return as_outputs(Float64(program).run(*inputs))
