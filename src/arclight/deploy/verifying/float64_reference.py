"""Run a quantized graph in float64 by independent rules, as a reference.

`verify_quantizer` compares the quantized program with `run_in_float64` (its report's ``judge``), and node by node with its float twin by
`compare_nodes`, in float32. The rules (`RULES`) must stay independent of torch's and torchao's kernels of quantization: they follow the definitions
of the ``quantized_decomposed`` operators. A new operator needs a rule; without one the graph is refused.
"""

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
"""Prefixes of the names of operators that quantize."""


def _round(x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> Tensor:
    """Return the integers, as float64: round half to even, then shift, then clamp."""
    rounded: Tensor = ((x / scale).round() + zero_point).clamp(low, high)
    return rounded


def _along(value: Any, axis: int, dims: int) -> Tensor:
    """Reshape per-channel values to broadcast along ``axis``."""
    shape = [1] * dims
    shape[axis] = -1
    return torch.as_tensor(value).double().reshape(shape)


def _number(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


def quantize_per_tensor(x: Tensor, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Quantize with one scale to the levels ``low`` .. ``high``, which ``dtype`` must hold."""
    _check_levels(low, high, dtype)
    return _round(x, _number(scale), _number(zero_point), low, high)


def dequantize_per_tensor(q: Tensor, scale: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype, **_: Any) -> Tensor:  # fmt: skip
    """Return the real values of integers with one scale."""
    _check_levels(low, high, dtype)
    result: Tensor = (q.double() - _number(zero_point)) * _number(scale)
    return result


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Quantize with a scale for each index of dimension ``axis``."""
    _check_levels(low, high, dtype)
    return _round(x, _along(scales, axis, x.dim()), _along(zero_points, axis, x.dim()), low, high)


def dequantize_per_channel(
    q: Tensor, scales: Tensor, zero_points: Tensor | None, axis: int, low: int, high: int, dtype: torch.dtype, **_: Any
) -> Tensor:
    """Return the real values of integers with a scale for each index of dimension ``axis``."""
    _check_levels(low, high, dtype)
    zero = 0.0 if zero_points is None else _along(zero_points, axis, q.dim())
    return (q.double() - zero) * _along(scales, axis, q.dim())


def choose_qparams(x: Tensor, low: int, high: int, eps: float, _: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of the range of ``x``, extended to include 0."""
    least, most = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = ((most - least) / (high - low)).clamp(min=eps)
    return scale.reshape(1), (low - (least / scale).round()).clamp(low, high).reshape(1)


def choose_qparams_symmetric(x: Tensor, low: int, high: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of a range that is symmetric about 0."""
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
"""Maps an operator of ``quantized_decomposed``, by its name without overload, to its rule."""


def _check_levels(low: int, high: int, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        raise QuantizeError(
            f"a quantize operator rounds to {dtype}: the float64 reference has rules for integer types only"
        )
    limits = torch.iinfo(dtype)
    if not limits.min <= low < high <= limits.max:
        raise QuantizeError(
            f"a quantize operator rounds to {low} .. {high}, which {dtype} does not hold: correct quant_min and quant_max"
        )


class _Float64Interpreter(Interpreter):
    """Interpreter with exact integers for quantizing operators (`RULES`), else float64.

    Raises QuantizeError for a quantizing operator without a rule.
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
                raise QuantizeError(f"{name} has no float64 rule to compare with; there are rules for {sorted(RULES)}")
            return rule(*args, **kwargs)
        if target is operator.getitem:
            return super().call_function(target, args, kwargs)
        args, kwargs = torch.utils._pytree.tree_map(_widened, (args, kwargs))
        return torch.utils._pytree.tree_map(_widened, super().call_function(target, args, kwargs))


def _widened(value: Any) -> Any:
    """Return a floating-point tensor or dtype as float64, anything else as it is."""
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


def compare_nodes(reference: GraphModule, program: GraphModule, inputs: Inputs) -> dict[str, Parity]:
    """Compare each operator of ``program`` with the same node of ``reference``.

    Each graph runs as a whole, so that errors of earlier operators count, too. The keys are names of nodes with the module of their code: "conv2d_1
    (backbone.stem)".
    """
    targets = {node.name: node for node in reference.graph.nodes if node.op == "call_function"}
    shared = {
        node.name: f"{node.name} ({module_name(node) or 'the model itself'})"
        for node in program.graph.nodes
        if node.name in targets and node.target is targets[node.name].target
    }
    recorders = [_Recorder(graph, shared) for graph in (reference, program)]
    with torch.no_grad():
        for recorder in recorders:
            recorder.run(*inputs)
    wanted, given = (recorder.values for recorder in recorders)
    return {
        shared[name]: compare([value], [given[name]])["0"]
        for name, value in wanted.items()
        if value.is_floating_point() and name in given and not value.isnan().any() and value.isfinite().any()
    }


def run_in_float64(program: GraphModule, inputs: Inputs) -> list[Tensor]:
    """Compute the outputs of a quantized graph in float64."""
    return as_outputs(_Float64Interpreter(program).run(*inputs))
