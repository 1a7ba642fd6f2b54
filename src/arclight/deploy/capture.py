"""Capture a private copy of a model as one graph of tensor operations, by torch.export.

`formats.export`, `quantizing` and `verifying` call `capture`; they, `comparison`, `deployment`, ``programs.benchmark`` and ``text`` copy models and
convert inputs by the functions here. In: a model and example inputs; out: an ``ExportedProgram`` with named free dimensions. `capture` takes the
model as it is: callers give it a copy, such as a `frozen_copy`, so that the user's model never changes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, OutputKind
from torch.utils._pytree import MappingKey, keystr, tree_flatten, tree_leaves_with_path

from arclight.deploy import failures
from arclight.deploy.errors import ExportError

aten = torch.ops.aten
Inputs = tuple[Tensor, ...]


def as_inputs(batch: Tensor | Sequence[Tensor]) -> Inputs:
    """Return the positional inputs of a model, given as a tensor or several, on the CPU.

    Raises TypeError for anything else, and for none.
    """
    inputs = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise TypeError(f"a batch must be a tensor or a sequence of tensors, got {type(batch).__name__}")
    return tuple(value.detach().cpu() for value in inputs)


def as_outputs(outputs: Any) -> list[Tensor]:
    """Flatten a model's output to tensors, in the order of torch.export; None is left out.

    Raises ExportError for an output of another type, and if there is no tensor.
    """
    tensors = []
    for place, value in tree_leaves_with_path(outputs):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is not None:
            name = keystr(place)
            raise ExportError(
                f"output{name} of the model is {value!r:.60}, of type {type(value).__name__}, and programs give tensors: return it as a "
                "tensor, or wrap the model in one that leaves it out"
            )
    if not tensors:
        raise ExportError(f"the model returns no tensor, but {type(outputs).__name__}: let it return at least one")
    return tensors


def absent_outputs(outputs: Any) -> list[str]:
    """Name the outputs that are None, by their places: "past", "0.hidden"."""
    return [_named(place) for place, value in tree_leaves_with_path(outputs) if value is None]


def output_keys(outputs: Any) -> list[str] | None:
    """Name the tensors of a dict by their places: "logits", "hidden.1".

    None for other outputs, and if the names are not unique, or a key is no text or empty.
    """
    places = [place for place, value in tree_leaves_with_path(outputs) if isinstance(value, Tensor)]
    names = [_named(place) for place in places]
    keys = [key.key for place in places for key in place if isinstance(key, MappingKey)]
    in_dict = isinstance(outputs, Mapping) and all(isinstance(key, str) and key for key in keys)
    return names if in_dict and len({*names}) == len(names) else None


def _named(place: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in place)


NOT_RUN = (
    "the model cannot be run on the example inputs ({given}): {error}; give example_inputs of the types and shapes that its float32 copy "
    "takes, or let it cast them"
)


def trial_run(
    model: nn.Module, inputs: Inputs, failure: type[ValueError] = ExportError, sentence: str = NOT_RUN
) -> Any:
    """Run ``model`` on ``inputs`` and return its outputs, to find errors before the capture.

    A copy runs, with the same parameters: a model may count its calls in buffers. Raises ``failure`` with ``sentence``, in which ``{given}`` and
    ``{error}`` are filled in, if the model fails.
    """
    with quiet():  # torch warns of itself where a graph is copied
        trial = copied_model(model, {id(parameter): parameter for parameter in model.parameters()})
    try:
        with torch.no_grad():
            return trial(*copied_inputs(inputs))
    except Exception as error:  # the model's own
        given = ", ".join(f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" for value in inputs)
        raise failure(sentence.format(given=given, error=error)) from error


def batch_size(inputs: Inputs) -> int:
    """Return how many samples ``inputs`` hold; ExportError if it is none."""
    if any(value.dim() and not len(value) for value in inputs):
        raise ExportError(
            f"the inputs have shapes {[tuple(value.shape) for value in inputs]} and hold no sample: give at least one"
        )
    return next((len(value) for value in inputs if value.dim()), 1)


def check_shared_batch(inputs: Inputs) -> None:
    """Raise ExportError for inputs of several first dimensions, which cannot all be the batch."""
    if len({len(value) for value in inputs if value.dim()}) > 1:
        raise ExportError(
            f"the first dimension of every input is the batch, and the inputs have shapes "
            f"{[tuple(value.shape) for value in inputs]}: put the batch first, make a table that all samples share a buffer "
            "of the model, or, in export, take dynamic_batch=False"
        )


def resized(inputs: Inputs, batch: int) -> Inputs:
    """Resize ``inputs`` to ``batch`` samples: the first ones, repeated in order if too few."""
    return tuple(value[torch.arange(batch) % len(value)] if value.dim() else value for value in inputs)


def copied_inputs(inputs: Inputs) -> Inputs:
    """Copy ``inputs`` for a model that may write into them."""
    return tuple(value.clone() for value in inputs)


def copied_model(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy ``model``, even if its layers keep tensors that were computed with gradients.

    Those of torch.nn.utils.weight_norm do, and ``copy.deepcopy`` refuses such tensors. ``memo``: that of ``copy.deepcopy``, copies by ``id``.
    """
    kept = (value for module in model.modules() for value in (*vars(module).values(), *module.buffers(recurse=False)))
    computed = {id(value): value.detach().clone() for value in kept if isinstance(value, Tensor) and not value.is_leaf}
    return copy.deepcopy(model, {**computed, **(memo or {})})


def frozen_copy(model: nn.Module) -> nn.Module:
    """Copy ``model`` to the CPU, in float32, in evaluation mode and without gradients."""
    return copied_model(model).cpu().float().eval().requires_grad_(False)


def in_float32(inputs: Inputs) -> Inputs:
    """Return ``inputs`` with every floating-point one in float32."""
    return tuple(value.float() if value.is_floating_point() else value for value in inputs)


def as_copy_inputs(model: nn.Module, inputs: Inputs) -> Inputs:
    """Cast ``inputs`` to the types that the `frozen_copy` of ``model`` takes.

    That copy is float32, so inputs in a floating-point type of the model's tensors become float32. bfloat16 ones do for every model, since
    programs take NumPy arrays, which have no bfloat16.
    """
    tensors = (*model.parameters(), *model.buffers())
    cast = {value.dtype for value in tensors if value.is_floating_point()} | {torch.bfloat16}
    return tuple(value.float() if value.dtype in cast else value for value in inputs)


FreeDimensions = Sequence[Mapping[int, str]]
"""Dynamic dimensions of each input with their names; equal names stand for equal sizes."""


def free_dimensions(
    model: nn.Module, example: Inputs, dynamic: Mapping[str, Mapping[int, str]]
) -> list[dict[int, str]]:  # fmt: skip
    """Return the free dimensions of each of ``example``, by the names in ``dynamic``.

    They are named by the parameters of ``model.forward``. ``{"tokens": {0: "batch", 1: "time"}}`` frees two dimensions
    of the input that ``forward`` calls tokens. Raises ExportError for an input or dimension that is not there, and for
    two sizes under one name.
    """
    names = input_names(model, len(example))
    if unknown := sorted(set(dynamic) - set(names)):
        raise ExportError(
            f"dynamic names the inputs {unknown}; the model takes {list(dict.fromkeys(names))}: name these"
        )
    sizes: dict[str, int] = {}
    for name, value in zip(names, example):
        for place, free in dynamic.get(name, {}).items():
            if not 0 <= place < value.dim():
                raise ExportError(
                    f"dynamic names dimension {place} of {name}, which has shape {tuple(value.shape)}: count from 0"
                )
            if sizes.setdefault(free, value.shape[place]) != value.shape[place]:
                raise ExportError(
                    f"dimension {place} of {name} is {value.shape[place]} long, another one called {free!r} is "
                    f"{sizes[free]}: equal names stand for equal sizes"
                )
    return [dict(dynamic.get(name, {})) for name in names]


def input_names(model: nn.Module, count: int) -> list[str]:
    """Name the first ``count`` positional inputs of ``model``.

    Those of ``*past`` are all called past.
    """
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        repeated = count - len(names) if parameter.kind is parameter.VAR_POSITIONAL else 1
        names += [parameter.name] * repeated
    return names[:count]


def with_sizes(inputs: Inputs, free: FreeDimensions, sizes: Mapping[str, int]) -> Inputs:
    """Resize the free dimensions of ``inputs`` to ``sizes`` by name.

    They hold the first values, repeated in order if too few. A dimension that was empty is filled with zeros.
    """
    resized_inputs = []
    for value, dimensions in zip(inputs, free):
        for place, name in dimensions.items():
            if name in sizes:
                if value.shape[place]:
                    value = value.index_select(place, torch.arange(sizes[name]) % value.shape[place])
                else:
                    value = value.new_zeros([*value.shape[:place], sizes[name], *value.shape[place + 1 :]])
        resized_inputs.append(value)
    return tuple(resized_inputs)


def free_sizes(inputs: Inputs, free: FreeDimensions) -> dict[str, int]:
    """Return how large each free dimension of ``inputs`` is."""
    return {name: value.shape[place] for value, named in zip(inputs, free) for place, name in named.items()}


def dimensions_to_export(
    example: Inputs, free: FreeDimensions, *, least: int = 1, largest: Mapping[str, int] | None = None
) -> tuple[Inputs, tuple[dict[int, Any], ...]]:  # fmt: skip
    """Return inputs to capture on, and free dimensions as torch.export takes them.

    The inputs have at least 2 of each free dimension, or the ``largest`` that is allowed later. ``least`` is the smallest size that is allowed; what is
    empty in ``example`` may be so later, too.
    """
    sizes, most = free_sizes(example, free), largest or {}
    dims = {name: Dim(name, min=least if size else 0, max=most.get(name)) for name, size in sizes.items()}
    # torch.export takes a size of 1 for a constant
    inputs = with_sizes(example, free, {name: most.get(name, max(2, size)) for name, size in sizes.items()})
    return inputs, tuple({place: dims[name] for place, name in named.items()} for named in free)


def capture(
    model: nn.Module, example: Inputs, *, dynamic_batch: bool = True, free: FreeDimensions | None = None,
    functional: bool = True, largest: Mapping[str, int] | None = None,
) -> ExportedProgram:  # fmt: skip
    """Capture ``model`` on ``example`` by torch.export, by default with a dynamic batch size.

    With ``dynamic_batch`` the first dimension of inputs may be any size. ``free`` names the dimensions that may, in
    place of the first ones. ``functional``: replace operators that write in place, which takes as long again as the capture; the conversion to
    ONNX does so itself. ``largest``: the most that free dimensions may be ("batch" is that of ``dynamic_batch``), for formats that plan memory; the graph
    is captured on them, so that what torch assumes of sizes holds there. What the model writes into buffers and inputs is no output of the graph. Raises
    ExportError if the model cannot be captured, say because it turns its batch size into a plain number, for a buffer that
    is read again at the next call, and for inputs that hold no sample, or do not share a batch size that is to be free.
    """
    shapes: tuple[dict[int, Any], ...] | None = None
    samples = batch_size(example)
    if free is not None:
        example, shapes = dimensions_to_export(example, free, largest=largest)
    elif dynamic_batch:
        check_shared_batch(example)
        most = None if largest is None else largest["batch"]
        example = resized(example, most or max(2, samples))  # torch.export takes a size of 1 for a constant
        batch = Dim("batch", min=1, max=most)
        shapes = tuple({0: batch} if value.dim() else {} for value in example)

    def export_again() -> ExportedProgram:
        with torch.no_grad(), quiet():
            return torch.export.export(model, example, dynamic_shapes=_as_passed(model, shapes))

    try:
        exported = export_again()
        if (functional and _writes_in_place(exported.graph_module.graph.nodes)) or _writes_buffers(exported):
            exported = _functional(exported)
    except Exception as error:  # torch.export raises many kinds, all of them about the model
        hint = "a model that needs a fixed batch size is exported with dynamic_batch=False"
        if free is not None:
            hint = "a dimension that the model fixes or bounds cannot be named in dynamic"
        why = failures.not_captured(error, model, export_again, sizes=hint)
        raise ExportError(f"torch.export cannot capture the model: {why}") from error
    return _without_writes(exported)


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported`` without operators in place; its outputs keep their names."""
    names = output_names(exported)
    with torch.no_grad(), quiet():
        found: ExportedProgram = exported.run_decompositions({})
    written = [spec.arg.name for spec in found.graph_signature.output_specs if spec.kind in _WRITES]
    found.graph.output_node().meta[_NAMES] = written + names
    return found


_NAMES = "arclight_names"
"""Key of the output node's ``meta`` with the names that all outputs had before operators in place were replaced, which names them anew."""


def output_names(exported: ExportedProgram) -> list[str]:
    """Name the outputs of ``exported`` by the operators of the model that give them."""
    output = exported.graph.output_node()
    names: list[str] = output.meta.get(_NAMES) or [str(value) for value in output.args[0]]
    return names[len(names) - len(exported.graph_signature.user_outputs) :]


def without_absent_outputs(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported`` without outputs that are None, which no runtime can give.

    If there are any, the others become a flat tuple.
    """
    specs = exported.graph_signature.output_specs
    kept = [not (spec.kind == OutputKind.USER_OUTPUT and _is_absent(spec.arg)) for spec in specs]
    if all(kept):
        return exported
    found = _with_outputs(exported, kept)
    given = (spec.arg for spec in found.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT)
    found.module_call_graph[0].signature.out_spec = tree_flatten(tuple(given))[1]
    return found


def _without_writes(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported`` without the values that it writes into buffers and inputs.

    Raises ExportError for a buffer from which an output is computed: a program keeps nothing between calls.
    """
    signature = exported.graph_signature
    kept = [spec.kind not in _WRITES for spec in signature.output_specs]
    if all(kept):
        return exported
    graph = exported.graph_module.graph
    values = [value for value, keep in zip(graph.output_node().args[0], kept) if keep]
    reached = {value for value in values if isinstance(value, torch.fx.Node)}
    for node in reversed(graph.nodes):
        if node in reached:
            reached.update(_read_by(node))
    written = set(signature.buffers_to_mutate.values())
    read = [signature.inputs_to_buffers.get(node.name) for node in graph.nodes if node in reached]
    if lost := [name for name in read if name in written]:
        raise ExportError(
            f"the model computes with what the call before has left in its buffers ({', '.join(map(str, lost))}), and a program keeps nothing between "
            "calls: let the model take that as an input, and return it"
        )
    found = _with_outputs(exported, kept)
    found.graph.eliminate_dead_code()
    found.graph_module.recompile()
    return found


_WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}
_OVERWRITES = {aten.copy, aten.fill, aten.zero, aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like}
"""Operators whose result has nothing of their first argument but its shape and type."""
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""By the operator that reads a part: the one that gives a tensor with this part replaced."""


def _read_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the inputs whose values the result of ``node`` is computed of.

    A part that has just been replaced is its replacement: nothing else of the tensor is read.
    """
    if (part := _replacement(node)) is not node:
        return [part]
    if getattr(node.target, "overloadpacket", None) in _OVERWRITES:
        return [arg for arg in (*node.args[1:], *node.kwargs.values()) if isinstance(arg, torch.fx.Node)]
    return node.all_input_nodes


def _replacement(node: torch.fx.Node) -> torch.fx.Node:
    """Return what replaced the part of a tensor that ``node`` reads; ``node`` if nothing did."""
    if node.target not in _SCATTERS or node.kwargs:
        return node
    whole = _replacement(node.args[0])  # type: ignore[arg-type]
    same = whole.target is _SCATTERS[node.target] and whole.args[2:] == node.args[1:]
    return _replacement(whole.args[1]) if same else node  # type: ignore[arg-type]


def _with_outputs(exported: ExportedProgram, kept: Sequence[bool]) -> ExportedProgram:
    """Return ``exported`` with those of its outputs that are ``kept``."""
    with quiet():  # torch warns of itself
        graph_module, calls = copy.deepcopy(exported.graph_module), copy.deepcopy(exported.module_call_graph)
    output = graph_module.graph.output_node()
    output.args = (tuple(value for value, keep in zip(output.args[0], kept) if keep),)
    if names := output.meta.get(_NAMES):
        output.meta[_NAMES] = [name for name, keep in zip(names, kept) if keep]
    graph_module.recompile()
    left = [spec for spec, keep in zip(exported.graph_signature.output_specs, kept) if keep]
    signature = ExportGraphSignature(exported.graph_signature.input_specs, left)
    return ExportedProgram(
        graph_module, graph_module.graph, signature, exported.state_dict, exported.range_constraints, calls,
        exported.example_inputs, exported.constants, verifiers=exported.verifiers,
    )  # fmt: skip


def _is_absent(argument: object) -> bool:
    return isinstance(argument, ConstantArgument) and argument.value is None


def _as_passed(model: nn.Module, shapes: tuple[dict[int, Any], ...] | None) -> tuple[Any, ...] | None:
    """Return ``shapes`` with those of ``*past`` as one tuple, which torch.export wants."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if shapes is None or inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*shapes[:first], shapes[first:])


def _writes_buffers(exported: ExportedProgram) -> bool:
    """Return True if an operator writes in place into a buffer or a part of one."""
    for node in exported.graph_module.graph.nodes:
        written = node.args[0] if _writes_in_place([node]) else None
        while isinstance(written, torch.fx.Node) and (written.target is operator.getitem or is_view(written)):
            written = written.args[0]
        if isinstance(written, torch.fx.Node) and written.name in exported.graph_signature.inputs_to_buffers:
            return True
    return False


def is_view(node: torch.fx.Node) -> bool:
    """Return True for an operator whose result is its first argument, or a part of that."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        value.alias_info is not None for value in node.target._schema.returns
    )


def _writes_in_place(nodes: Iterable[torch.fx.Node]) -> bool:
    return any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in nodes
        if node.target is not torch.ops.aten.batch_norm.default
    )


_LOGGERS = ("torch", "onnxscript", "onnx_ir")
_PACKAGES = ("torch", "torchao", "executorch", "onnxscript", "onnx_ir", "onnx", "openvino", "arclight.deploy")
"""Packages whose warnings `quiet` drops: they are about how these capture and convert."""
_ANNOUNCERS = ("typing_extensions", "warnings", "copy", "copyreg")
"""Modules that issue warnings for their callers, such as the decorator of a deprecated class when a graph is copied: the caller decides."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what exporters print, warn and log; an error carries it along as a note.

    Warnings of anybody else, such as the model, are issued afterwards, each once; beside an error they are in its note.
    """
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    loggers = _loggers()
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    others: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    warning_texts: list[str] = []

    def keep(
        message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        warning_texts.append(f"{category.__name__}: {message}")
        if not _is_exporters(sys._getframe(1)):
            others[str(message), category, filename, lineno] = (message, category, filename, lineno)

    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        warnings.showwarning = keep
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False
        try:
            yield
        except Exception as error:
            if lines := [*output.getvalue().splitlines(), *warning_texts]:
                error.add_note("\n".join(["What the exporter said before it failed:", *lines[-40:]]))
            raise
        finally:
            for logger, (handlers, propagate) in zip(loggers, before):
                logger.handlers, logger.propagate = handlers, propagate
    for warned in others.values():
        _issue(*warned)


def _issue(message: Any, category: type[Warning], filename: str, lineno: int) -> None:
    """Issue a warning as its module would.

    Filters go by the module's name, and it keeps what was shown once.
    """
    module = next((one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == filename), None)
    if module is None:
        warnings.warn_explicit(message, category, filename, lineno)
    else:
        registry = vars(module).setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, filename, lineno, module.__name__, registry)


def _loggers() -> list[logging.Logger]:
    """Return the exporters' loggers that write by themselves.

    Those of torch.distributed, and those that were asked for details, are left out.
    """
    named = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    loggers = [logging.getLogger(name) for name in (*_LOGGERS, *named) if not name.startswith("torch.distributed")]
    return [
        logger
        for logger in loggers
        if (logger.name in _LOGGERS or logger.handlers or not logger.propagate)
        and (logger.level == logging.NOTSET or logger.level >= logging.WARNING)
    ]


def _is_exporters(frame: FrameType | None) -> bool:
    """Return True if code of an exporter warns in ``frame``, whatever line the warning is about."""
    while frame is not None and frame.f_globals.get("__name__") in _ANNOUNCERS:
        frame = frame.f_back
    if frame is not None and frame.f_code is _issue.__code__:  # of an inner `quiet`, which has judged it
        return False
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return f"{name}.".startswith(tuple(f"{package}." for package in _PACKAGES))
