"""Define the formats of programs, and which recipes each can hold; refuse others.

`export` and `deployment` choose a format here, and `export` writes it. A new one needs an entry in `Format`, ``folder.RUNTIMES`` and the tables here,
a function in `_WRITERS`, and a session in ``programs`` if its runtime is new. Names of formats are in programs and in commands: they must stay. A
refusal names what to do instead.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from arclight.deploy import failures
from arclight.deploy.capture import FreeDimensions, output_names, quiet
from arclight.deploy.errors import ExportError
from arclight.deploy.formats import onnx_graph
from arclight.deploy.programs.folder import NAME, RUNTIMES, foreign_files
from arclight.deploy.programs.session import TensorSpec, dtype_name
from arclight.deploy.settings import Runtime, Target
from arclight.fabric.extras import require

Format = Literal["onnx", "openvino", "pt2", "aoti", "executorch"]
Several = list[Format] | tuple[Format, ...]
Fastest = Literal["fastest"]
"""Choice in place of a format: the one whose program is fastest on this machine."""
PLANNED: frozenset[Format] = frozenset({"executorch"})
"""Formats whose memory is planned when they are written, for the largest size of each free dimension."""
DEFAULT: Format = "openvino"
"""The format of a folder, if none is given."""
LONE = ".onnx"
"""Suffix of the only program that is one file; all others are folders."""

_REFUSED: Mapping[str, str] = {
    "tensorrt": "nothing here runs tensorrt programs, whatever is installed, so none could be compared with its model: run trtexec on the .onnx file "
    "where the GPU is",
    "coreml": "nothing here runs coreml programs, whatever is installed, so none could be compared with its model: convert format 'pt2' with coremltools, "
    "and compare it on macOS",
    "litert": "nothing here runs litert programs, whatever is installed, so none could be compared with its model: convert format 'pt2' with litert-torch, "
    "and compare it there",
    "torchscript": "TorchScript is deprecated by torch and never written here: take 'pt2'",
}
_SUFFIXES: Mapping[str, str] = {
    ".pte": "executorch", ".engine": "tensorrt", ".plan": "tensorrt", ".mlpackage": "coreml", ".mlmodel": "coreml",
    ".tflite": "litert", ".ts": "torchscript", ".torchscript": "torchscript", ".xml": "openvino", ".pt2": "pt2", ".so": "aoti",
}  # fmt: skip
_FLOAT: Mapping[Format, Runtime] = {
    "onnx": "onnxruntime", "openvino": "openvino", "pt2": "torch", "aoti": "inductor", "executorch": "executorch",
}  # fmt: skip
"""Maps a format to the runtime of its float programs."""
_QUANTIZED: Mapping[Target, Mapping[Format, Runtime]] = {
    "onnxruntime": {"onnx": "onnxruntime"},
    "openvino": {"openvino": "openvino", "onnx": "openvino"},
    "inductor": {"aoti": "inductor"},
    "executorch": {"executorch": "executorch"},
    "tensorrt": {"onnx": "onnxruntime"},  # where its programs are compared with their models
}
"""Maps the target of a quantized model to its formats, the default one first, with the runtime that runs each here."""
_WEIGHTS: Mapping[Format, Runtime] = {**_QUANTIZED["onnxruntime"], "openvino": "openvino"}
"""Formats of weights in groups: OpenVINO reads ONNX Runtime's operator, keeps the weights packed, and rounds activations if that is faster."""
_QUANTIZED_BY: Mapping[str, Mapping[Format, Runtime]] = {"8-bit weights": _WEIGHTS, "4-bit weights": _WEIGHTS}
"""Maps a precision to its formats and their runtimes, if these are more than those of its target."""
_NOT_ROUNDED: Mapping[str, str] = {
    "w4a8": "OpenVINO chooses itself whether it rounds activations, so it may compute W4A8 as 4-bit weights: take WeightOnly(bits=4), which has the "
    "same weights, or format onnx",
    "dynamic int8": "OpenVINO has no kernel for ranges of each call, and would multiply in float32 after rounding: take WeightOnly(), or format onnx",
}
"""Maps a precision to the reason why there is no OpenVINO program of it, and what to take."""


@dataclass(frozen=True)
class Captured:
    """A model as one graph, with the names of its inputs, outputs and free dimensions."""

    exported: ExportedProgram
    free: FreeDimensions
    """Free dimensions of each input; their names are those of the program's."""
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    output_keys: Sequence[str] | None = None
    """Names of outputs without ``output_names``: their places in the dict that the model returns; None if it returns something else."""

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of inputs and outputs, unique.

        By default they are the keys of outputs, or from the graph. An output whose name is taken by an input or another output gets a number.
        Raises ExportError if an output is named like an input.
        """
        taken, _ = self._nodes()
        inputs = list(self.input_names or [node.name for node in taken])
        if self.output_names is not None:
            if taken_twice := [name for name in self.output_names if name in inputs]:
                raise ExportError(
                    f"output_names give {', '.join(taken_twice)}, and an input is called so: name it otherwise, or the input by input_names"
                )
            return inputs, list(self.output_names)
        outputs: list[str] = []
        for wanted in self.output_keys or output_names(self.exported):
            names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
            outputs.append(next(name for name in names if name not in inputs and name not in outputs))
        return inputs, outputs

    def _nodes(self) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
        """Return the nodes of inputs and outputs."""
        nodes = {node.name: node for node in self.exported.graph.nodes}
        signature = self.exported.graph_signature
        taken = [nodes[name] for name in signature.user_inputs if isinstance(name, str)]
        given = list(tree_leaves([node.args for node in nodes.values() if node.op == "output"]))
        return taken, given[len(given) - len(signature.user_outputs) :]

    def symbols(self) -> dict[str, str]:
        """Map the graph's symbols of free dimensions to their names."""
        taken, _ = self._nodes()
        return {
            str(node.meta["val"].shape[place]): name
            for node, named in zip(taken, self.free)
            for place, name in named.items()
        }

    def to_onnx(self) -> Any:
        """Convert to ONNX, with the names of inputs, outputs and free dimensions."""
        inputs, outputs = self.names()
        return onnx_graph.convert(
            self.exported, input_names=inputs, output_names=outputs, dimension_names=self.symbols()
        )

    def specs(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the specs of inputs and outputs.

        Sizes that depend on free dimensions are expressions in their names.
        """
        (taken, given), symbols = self._nodes(), self.symbols()
        inputs, outputs = self.names()
        return (
            tuple(_spec(name, node.meta["val"], symbols) for name, node in zip(inputs, taken)),
            tuple(_spec(name, node.meta["val"], symbols) for name, node in zip(outputs, given)),
        )


def _spec(name: str, value: torch.Tensor, symbols: Mapping[str, str]) -> TensorSpec:
    def size(length: Any) -> int | str:
        if isinstance(length, int):
            return length
        text = str(length)
        for symbol, free in symbols.items():
            text = text.replace(symbol, free)
        return text

    return TensorSpec(name, dtype_name(value.dtype), tuple(size(length) for length in value.shape))


LARGEST_SIZE = 15
"""Size of a free dimension that memory is planned for in format executorch, if it is compared on no larger ones. As torch lowers a convolution it asks
whether the batch is smaller than 16, and bounds the graph by the answer."""


def planned_size(largest: int) -> int:
    """Return the size to plan memory of a free dimension for.

    ``largest``: the largest that it is compared on.
    """
    return LARGEST_SIZE if largest <= LARGEST_SIZE else 2 * largest


_ISA = {"avx512": "avx512f"}
"""Maps AOTInductor's name of an instruction set to Linux's, if they differ."""


def write_graph(exported: ExportedProgram, path: Path) -> None:
    """Save ``exported`` without its example inputs, which are users' data.

    Torch would pickle them.
    """
    examples = exported.example_inputs
    exported.example_inputs = None
    try:
        with quiet():
            torch.export.save(exported, path)
    except Exception as error:  # torch raises many kinds, all of them about the graph
        raise ExportError(f"torch.export cannot save the model: {failures.plain(error)}") from error
    finally:
        exported.example_inputs = examples


def write_library(exported: ExportedProgram, path: Path) -> dict[str, Any]:
    """Compile ``exported`` with AOTInductor; return what the library requires.

    It is compiled frozen and without gradients: otherwise an int8 graph gets no integer kernels. Raises ExportError without a C++ compiler, and for a
    graph that cannot be compiled.
    """
    from torch._inductor import aoti_compile_and_package, cpp_builder, exc
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ExportError("AOTInductor compiles C++: install g++ or clang++, or name a compiler in CXX") from error
    try:
        with torch.no_grad(), quiet():
            aoti_compile_and_package(exported, package_path=str(path), inductor_configs={"freezing": True})
    except Exception as error:  # inductor raises many kinds
        why = failures.not_converted(error, failures.OTHERWISE)
        raise ExportError(f"AOTInductor cannot compile the model: {why}") from error
    names = [name for name in str(pick_vec_isa()).split() if name != "INVALID_VEC_ISA"]
    return {
        "requires": [_ISA.get(name, name) for name in names],
        "requires_machine": platform.machine(),
        "passes": ["freezing"],
    }


def write_lowered(exported: ExportedProgram, path: Path) -> None:
    """Lower ``exported`` to ExecuTorch, what XNNPACK can compute to XNNPACK.

    Biases of integer layers become float in ``exported``. Memory of inputs and outputs is the caller's, that between XNNPACK's parts is planned for the
    largest sizes. Raises ExportError for a graph that cannot be lowered, and for one with an input among its outputs, where executorch would give
    another value.
    """
    require("executorch.version", extra="executorch")
    signature = exported.graph_signature
    if passed := [name for name in signature.user_outputs if name in signature.user_inputs]:
        raise ExportError(
            f"the model returns its input {', '.join(map(str, passed))} as it is, and programs of executorch give another value there: leave it out, "
            "or take another format"
        )
    try:
        with torch.no_grad(), _root_handlers_kept(), quiet():
            exir = importlib.import_module("executorch.exir")
            passes = importlib.import_module("executorch.exir.passes")
            xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
            planning = passes.MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
            _write_float_biases(exported)
            lowered = exir.to_edge_transform_and_lower(exported, partitioner=[xnnpack.XnnpackPartitioner()])
            program = lowered.to_executorch(exir.ExecutorchBackendConfig(memory_planning_pass=planning))
    except Exception as error:  # executorch raises many kinds
        why = failures.not_converted(error, failures.OTHERWISE)
        raise ExportError(f"executorch cannot lower the model: {why}") from error
    with path.open("wb") as file:
        program.write_to_file(file)


@contextmanager
def _root_handlers_kept() -> Iterator[None]:
    """Restore the root logger's handlers after the block; executorch sets them on import."""
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = before


def _write_float_biases(exported: ExportedProgram) -> None:
    """Store in float, in place, the biases that integer layers of ``exported`` read as int32.

    XNNPACK rounds them itself, to the same integers.
    """
    graph, state, names = exported.graph, exported.state_dict, exported.graph_signature.inputs_to_buffers
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    for node in graph.find_nodes(op="call_function", target=dequantize):
        bias, scale, zero_point, *rest = node.args
        held = all(one.name in names for one in node.all_input_nodes)
        if bias.meta["val"].dtype != torch.int32 or len(bias.users) > 1 or not held:
            continue
        values = (state[names[one.name]] for one in (bias, scale, zero_point))
        state[names[bias.name]] = dequantize(*values, *rest)
        bias.meta = {**bias.meta, "val": node.meta["val"]}
        node.replace_all_uses_with(bias)
        graph.erase_node(node)
    exported.graph_module.recompile()


def destination(path: str | os.PathLike[str], format: str | None, target: Target | None) -> tuple[Path, Format]:
    """Return path and format of a program: by argument, else suffix, else its target.

    ``target``: that of the quantization; None for a float model, whose default is openvino. Raises ExportError for a format that is refused or does not fit
    the suffix, and for a path where something else would be replaced.
    """
    path = Path(path)
    by_suffix = "onnx" if path.suffix == LONE else _SUFFIXES.get(path.suffix)
    named = format or by_suffix or next(iter(_QUANTIZED[target] if target else ()), DEFAULT)
    if named in _REFUSED:
        raise ExportError(f"format {named!r} is not written: {_REFUSED[named]}")
    if named not in RUNTIMES:
        raise ExportError(f"format {named!r} is not known; there are {', '.join(RUNTIMES)}")
    if path.suffix in _SUFFIXES:
        raise ExportError(
            f"{path}: a program of format {named} is a folder: call it {path.with_suffix('')}, format={named!r}"
        )
    if path.suffix == LONE and named != "onnx":
        raise ExportError(f"{path} names an ONNX file, and the format is {named!r}: name a folder, without {LONE}")
    if path.name in ("", ".."):
        raise ExportError(
            f"{path} has no name of its own, by which a program is replaced in one step: name a folder in it"
        )
    check_replaceable(path)
    return path, named  # type: ignore[return-value]


def destination_in(path: str | os.PathLike[str], format: Format) -> Path:
    """Return the path of one of several programs in the folder ``path``.

    Raises ExportError if that is no such folder.
    """
    path = Path(path)
    if path.suffix == LONE or path.suffix in _SUFFIXES:
        raise ExportError(
            f"{path} names a file, and several formats are folders in one: call it {path.with_suffix('')}"
        )
    if (path / NAME).exists():
        raise ExportError(f"{path} is a program itself, and would hold others: name another folder for several formats")
    if path.exists() and not path.is_dir():
        raise ExportError(f"{path} is a file, and several formats are folders in one: name a folder")
    return path / format


def check_replaceable(path: Path) -> None:
    """Raise ExportError if something at ``path`` would be lost with the replaced program."""
    if path.is_symlink():
        raise ExportError(
            f"{path} is a link to {path.readlink()}, and the program would take the place of the link alone: name the path that it leads to, or remove the link"
        )
    if path.suffix == LONE:
        if path.is_dir():
            raise ExportError(f"{path} is a folder, and a program of that name is one file: name another one")
    elif path.exists() and not path.is_dir():
        raise ExportError(f"{path} is a file and no program's folder: it is not replaced, name a folder")
    elif path.is_dir() and (foreign := foreign_files(path)):
        raise ExportError(
            f"{path} exists and is not a program, or holds other files as well: {NAME} does not list {', '.join(foreign[:5])}: it is "
            "not replaced, name another folder"
        )


def quantized_formats(precision: str, target: Target) -> Mapping[Format, Runtime]:
    """Return the formats of a model of ``precision`` for ``target``, and what runs each here."""
    return _QUANTIZED_BY.get(precision, _QUANTIZED[target])


def runtime_of(format: Format, precision: str, target: Target | None) -> Runtime:
    """Return the runtime of a program of ``precision`` in ``format``.

    ``target``: that of the quantization, None for a float model. Raises ExportError if programs of ``target`` are not of that format.
    """
    if target is None:
        return _FLOAT[format]
    formats_of_it = quantized_formats(precision, target)
    runtime = formats_of_it.get(format)
    if runtime is not None:
        return "openvino-bf16" if precision == "bf16" else runtime
    if format == "pt2":
        raise ExportError(
            f"torch runs an {precision} graph in float, with rounding simulated, so there is no {precision} pt2: take format "
            f"{', '.join(formats_of_it) or 'onnx'}"
        )
    if format == "openvino" and precision in _NOT_ROUNDED:
        raise ExportError(f"there is no {precision} program of format openvino: {_NOT_ROUNDED[precision]}")
    if precision != "int8":  # which alone is placed for several targets
        raise ExportError(
            f"there is no {precision} program of format {format}: take format {', '.join(formats_of_it)}, or Int8()"
        )
    files = "ONNX files" if format == "onnx" else f"{format} programs"
    able = [repr(name) for name, formats in _QUANTIZED.items() if format in formats and name != "tensorrt"]
    formats = f", or take format {', '.join(_QUANTIZED[target])}" if _QUANTIZED[target] else ""
    raise ExportError(
        f"the model was quantized for {target}, which does not run {files}: quantize it with target={' or '.join(able)}{formats}"
    )


def write(
    captured: Captured, folder: Path, format: Format, precision: str, stem: str
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Write ``captured`` into ``folder``; return the main file's name, and requirements.

    These are entries of the description that say what the program requires of a machine (``requires``, ``requires_machine``, ``passes``), for
    aoti, and of its inputs (``largest_sizes``), for executorch.
    """
    main = f"{stem}{_ENDINGS[format]}"
    return main, _WRITERS[format](captured, folder / main, precision)


def _write_onnx(captured: Captured, path: Path, precision: str) -> dict[str, Any]:
    onnx_graph.write(captured.to_onnx(), path)
    return {}


def _write_openvino(captured: Captured, path: Path, precision: str) -> dict[str, Any]:
    """Write OpenVINO's representation of the ONNX graph.

    Its reader of torch graphs loses names, and has no rounded layers.
    """
    openvino = require("openvino", extra="deploy")
    sources = onnx_graph.write(captured.to_onnx(), path.with_name("source.onnx"))
    try:
        converted = openvino.convert_model(sources[-1])
        openvino.save_model(converted, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise ExportError(f"OpenVINO cannot convert the model: {failures.plain(error)}") from error
    finally:
        for source in sources:
            source.unlink()
    return {}


def _write_pt2(captured: Captured, path: Path, precision: str) -> dict[str, Any]:
    write_graph(captured.exported, path)
    return {}


def _write_aoti(captured: Captured, path: Path, precision: str) -> dict[str, Any]:
    if precision == "int8" and any(captured.free):
        raise ExportError(
            "AOTInductor makes integer kernels of an int8 model for fixed shapes only: export with dynamic_batch=False"
        )
    return write_library(captured.exported, path)


def _write_executorch(captured: Captured, path: Path, precision: str) -> dict[str, Any]:
    ranges = {str(symbol): values for symbol, values in captured.exported.range_constraints.items()}
    symbols = captured.symbols()
    if empty := [name for symbol, name in symbols.items() if ranges[symbol].lower == 0]:
        raise ExportError(
            f"executorch ends the process where an input is empty, and {', '.join(empty)} may be 0, as of a cache before the first token: take another format"
        )
    write_lowered(captured.exported, path)
    kept = captured.symbols()  # lowering may find that the graph holds for the sizes alone that it was captured on
    if fixed := [name for symbol, name in symbols.items() if symbol not in kept]:
        raise ExportError(
            f"executorch plans memory for the largest sizes, and captured on them the lowered graph holds for one size of {', '.join(fixed)} alone: "
            "export it for fixed sizes, or take another format"
        )
    largest = {name: int(ranges[symbol].upper) for symbol, name in symbols.items()}
    return {"largest_sizes": largest} if largest else {}


_ENDINGS: Mapping[Format, str] = {
    "onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2", "aoti": ".pt2", "executorch": ".pte",
}  # fmt: skip
_WRITERS: Mapping[Format, Callable[[Captured, Path, str], dict[str, Any]]] = {
    "onnx": _write_onnx, "openvino": _write_openvino, "pt2": _write_pt2, "aoti": _write_aoti,
    "executorch": _write_executorch,
}  # fmt: skip
