"""Convert captured graphs to ONNX, and write them with their weights.

`export`, `formats` and ``verifying.verify`` call `convert` and `write`. Names of inputs and outputs are the caller's, or else the graph's; the opset
is the default of ``torch.onnx.export``. A new operator of `quantizing` needs a function in `_translations`. By the form of their names `export` finds
the weight files that it may delete: it must stay.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.export import ExportedProgram

from arclight.deploy import failures
from arclight.deploy.capture import quiet
from arclight.deploy.errors import ExportError
from arclight.deploy.quantizing import bfloat16, linear
from arclight.fabric.extras import require

if TYPE_CHECKING:
    import onnx

LARGEST_FILE = 2**31 - 2**24
"""Bytes from which weights are kept in a file of their own: protobuf messages end at 2 GiB, and hold more than weights."""


def convert(
    exported: ExportedProgram,
    *,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dimension_names: Mapping[str, str] = MappingProxyType({}),
) -> onnx.ModelProto:
    """Convert ``exported`` to ONNX.

    ``dimension_names`` maps the graph's symbols of free dimensions to their names in the file. Raises ExportError if ONNX cannot express it.
    """
    require("onnxscript", extra="deploy")
    given_names = [*(input_names or ()), *(output_names or ())]
    stand_ins = {f"{number}::{name}": name for number, name in enumerate(given_names)}
    try:
        with torch.no_grad(), quiet(), _cached_tables():
            program = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                input_names=None if input_names is None else list(stand_ins)[: len(input_names)],
                output_names=None if output_names is None else list(stand_ins)[len(input_names or ()) :],
                custom_translation_table=_translations(),
            )
            assert program is not None
            model: onnx.ModelProto = program.model_proto
    except Exception as error:  # the exporter raises many kinds, all of them about operators that ONNX does not have
        why = failures.not_converted(error, failures.IN_ONNX)
        raise ExportError(f"the model cannot be written as ONNX: {why}") from error
    _rename(model.graph, stand_ins)
    _tidy(model, dimension_names)
    if any(node.op_type == "DequantizeLinear" for node in model.graph.node):
        _select_in_two_steps(model)
        _transpose_shared_weights(model)
        _clip_by_extremes(model)
    return model


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Give values their ``names``, by those that they have.

    Another value that is so named gets a number: torch names inner values by their operators, and would give an output the name of one of
    them, such as ``relu``.
    """
    held: set[str] = set()
    _map_names(graph, lambda name: held.add(name) or name)  # type: ignore[func-returns-value]
    taken, replaced = held.union(names.values()), dict(names)
    for name in held.intersection(names.values()):
        replaced[name] = next(other for number in itertools.count(1) if (other := f"{name}_{number}") not in taken)
        taken.add(replaced[name])
    _map_names(graph, lambda name: replaced.get(name, name))


def _map_names(graph: onnx.GraphProto, name_of: Callable[[str], str]) -> None:
    """Replace the names of values in ``graph`` and the graphs inside of it."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = name_of(value.name)
    for node in graph.node:
        node.input[:] = [name_of(name) for name in node.input]
        node.output[:] = [name_of(name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _map_names(inner, name_of)


def write(model: onnx.ModelProto, path: Path) -> list[Path]:
    """Write ``model``; return its files, ``path`` last.

    They are two if one cannot hold the weights: these then lie beside it in STEM-DIGEST.data, so that they never replace those of another
    program.
    """
    held = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if held < LARGEST_FILE:
        path.write_bytes(model.SerializeToString(deterministic=True))
        return [path]
    digest = hashlib.sha256()
    for tensor in model.graph.initializer:
        digest.update(tensor.raw_data)
    weights = f"{path.stem}-{digest.hexdigest()[:16]}.data"
    require("onnx", extra="deploy").save_model(
        model, str(path), save_as_external_data=True, location=weights, size_threshold=1024
    )
    return [path.with_name(weights), path]


_TABLES = threading.Lock()


@contextmanager
def _cached_tables() -> Iterator[None]:
    """Cache torch's tables of ONNX functions and decompositions between conversions.

    torch makes both for each model, by reading the sources of 500 functions, which takes longer than converting a small model does.
    """
    from torch.onnx._internal.exporter import _decomp as decompositions
    from torch.onnx._internal.exporter._registration import ONNXRegistry as Registry

    with _TABLES:
        make, decompose = Registry.from_torchlib, decompositions.create_onnx_friendly_decomposition_table

        def from_torchlib(opset_version: int) -> Registry:
            known, copied = _known(make, opset_version, _operators()), Registry()
            copied._opset_version = opset_version
            copied.functions = {operator: list(functions) for operator, functions in known.functions.items()}
            return copied

        def decomposition_table(implemented: set[Any]) -> dict[Any, Any]:
            return dict(_known(decompose, frozenset(implemented), _operators()))

        replaced: list[tuple[Any, str, Any]] = [
            (Registry, "from_torchlib", staticmethod(from_torchlib)),
            (decompositions, decompose.__name__, decomposition_table),
        ]
        before = [vars(holder)[name] for holder, name, _ in replaced]
        try:
            for holder, name, cached in replaced:
                setattr(holder, name, cached)
            yield
        finally:
            for (holder, name, _), original in zip(replaced, before):
                setattr(holder, name, original)


def _operators() -> int:
    """Count torch's operators: after a library adds some, the cached tables are made again."""
    return len(torch._C._dispatch_get_all_op_names())


@functools.lru_cache(maxsize=8)
def _known(make: Callable[[Any], Any], of: Any, operators: int) -> Any:
    return make(of)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Map operators of `linear` and `bfloat16` to functions that write them as ONNX."""
    values = require("onnxscript.values", extra="deploy")
    onnxscript = require("onnxscript", extra="deploy")
    defs = require("onnx.defs", extra="deploy")
    op, schema = onnxscript.opset20, defs.OpSchema
    taken = [("A", "T1"), ("B", "T2"), ("scales", "T1"), ("zero_points", "T2"), ("g_idx", "T3"), ("bias", "T1")]
    kinds = {"T1": "float", "T2": "uint8", "T3": "int32"}
    optional = schema.FormalParameterOption.Optional
    nbits = values.Op(
        values.Opset("com.microsoft", 1),
        "MatMulNBits",
        schema(  # the one of ONNX Runtime, as far as it is used here
            "MatMulNBits",
            "com.microsoft",
            1,
            inputs=[
                schema.FormalParameter(name, kind, **({"param_option": optional} if place > 2 else {}))
                for place, (name, kind) in enumerate(taken)
            ],
            outputs=[schema.FormalParameter("Y", "T1")],
            type_constraints=[(kind, [f"tensor({held})"], "") for kind, held in kinds.items()],
            attributes=[
                schema.Attribute(name, schema.AttrType.INT)
                for name in ("K", "N", "bits", "block_size", "accuracy_level")
            ],
        ),
    )

    def grouped(x: Any, weight: Any, scale: Any, bias: Any, bits: int, integer: bool) -> Any:
        outputs, groups, size = (int(length) for length in weight.shape)
        width = size * 8 // bits
        return nbits(
            x, weight, scale, None, None, bias, K=groups * width, N=outputs, bits=bits, block_size=width,
            accuracy_level=4 if integer else 1,  # as ONNX Runtime numbers them: 8-bit integers, float32
        )  # fmt: skip

    def dynamic(x: Any, weight: Any, scale: Any, bias: Any) -> Any:
        # in the order that ONNX Runtime fuses to one kernel
        rounded, unit, zero_point = op.DynamicQuantizeLinear(x)
        sums = op.Cast(op.MatMulInteger(rounded, op.Transpose(weight, perm=[1, 0]), zero_point), to=1)
        product = op.Mul(sums, op.Mul(unit, scale))
        return product if bias is None else op.Add(product, bias)

    def rounded(x: Any) -> Any:
        return op.Identity(x)

    return {linear.GROUPED: grouped, linear.DYNAMIC: dynamic, bfloat16.ROUND: rounded}


def _select_in_two_steps(model: onnx.ModelProto) -> None:
    """Write x[:, i] as the slice of one element, whose dimension is then dropped.

    OpenVINO 2026.4 moves the scale of a rounded layer behind a Gather by a scalar, with the rank that it had before, and the output
    then has a dimension more (1, N, ...).
    """
    onnx = require("onnx", extra="deploy")
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        index = held.get(node.input[1]) if node.op_type == "Gather" else None
        if index is None or index.dims or node.input[0] in held:
            nodes.append(node)
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        name = node.output[0]
        for role, values in (
            ("index", onnx.numpy_helper.to_array(index).reshape(1)),
            ("axes", np.array([axis], np.int64)),
        ):
            model.graph.initializer.append(onnx.numpy_helper.from_array(values, f"{name}_{role}"))
        nodes += [
            onnx.helper.make_node(
                "Gather", [node.input[0], f"{name}_index"], [f"{name}_kept"], name=node.name, axis=axis
            ),
            onnx.helper.make_node("Squeeze", [f"{name}_kept", f"{name}_axes"], [name], name=f"{node.name}_squeezed"),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _transpose_shared_weights(model: onnx.ModelProto) -> None:
    """Store transposed the rounded weight of a linear layer that is applied more than once.

    ONNX Runtime 1.32 finds no integer kernel for products that share one transposition of a weight.
    """
    onnx = require("onnx", extra="deploy")
    graph = model.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    reads = Counter(_names_read(graph))
    written = {node.output[0]: node for node in graph.node}
    for node in [node for node in graph.node if node.op_type == "Transpose" and reads[node.output[0]] > 1]:
        source = written.get(node.input[0])
        if source is None or source.op_type != "DequantizeLinear" or source.input[0] not in held:
            continue
        weight = held[source.input[0]]
        if len(weight.dims) != 2:
            continue
        values = np.ascontiguousarray(onnx.numpy_helper.to_array(weight).T)
        graph.initializer.append(onnx.numpy_helper.from_array(values, f"{node.output[0]}_stored"))
        axis = next((attribute.i for attribute in source.attribute if attribute.name == "axis"), 1)
        inputs = [f"{node.output[0]}_stored", *source.input[1:]]
        node.CopyFrom(onnx.helper.make_node("DequantizeLinear", inputs, node.output, name=node.name, axis=1 - axis))
        if reads[source.output[0]] == 1:
            graph.node.remove(source)
            if reads[weight.name] == 1:
                graph.initializer.remove(weight)


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the name of each value that a node, or a branch or loop in one, reads."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _names_read(inner)


def _clip_by_extremes(model: onnx.ModelProto) -> None:
    """Write a Relu or Clip between a rounded Gemm and a float operator as Max and Min.

    ONNX Runtime (1.32) takes a Relu or Clip behind a Gemm for a part of the rounding that must follow; if none does, the Gemm stays in float32.
    """
    onnx = require("onnx", extra="deploy")
    writers = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def rounded(node: Any) -> bool:
        gemm = writers.get(node.input[0])
        return (
            gemm is not None
            and gemm.op_type == "Gemm"
            and all(name in writers and writers[name].op_type == "DequantizeLinear" for name in gemm.input[:2])
        )

    nodes = []
    for node in model.graph.node:
        behind = readers.get(node.output[0], [])
        is_clip = (node.op_type == "Relu" or (node.op_type == "Clip" and any(node.input[1:]))) and rounded(node)
        if not is_clip or not behind or all(reader.op_type == "QuantizeLinear" for reader in behind):
            nodes.append(node)
            continue
        bounds = [*node.input[1:]]
        if node.op_type == "Relu":
            bounds = [f"{node.output[0]}_least"]
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.float32), bounds[0]))
        source, steps = node.input[0], [(kind, bound) for kind, bound in zip(("Max", "Min"), bounds) if bound]
        for place, (kind, bound) in enumerate(steps):
            given = node.output[0] if place == len(steps) - 1 else f"{node.output[0]}_{kind}"
            nodes.append(onnx.helper.make_node(kind, [source, bound], [given], name=f"{node.name}_{kind}"))
            source = given
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _tidy(model: onnx.ModelProto, dimension_names: Mapping[str, str]) -> None:
    """Delete the exporter's notes (source lines, local paths) and name the free dimensions."""
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:], graph.value_info[:]
    described: Iterable[Any] = (*graph.node, *graph.input, *graph.output, *graph.initializer)
    for item in described:
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:  # a symbol, or an expression of some
                dim.dim_param = re.sub(r"\w+", lambda word: dimension_names.get(word[0], word[0]), dim.dim_param)
