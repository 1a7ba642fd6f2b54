"""Export a model's forward as one graph, and refuse what `torch.export` would lose.

`traced_stage` calls `export` for `split`, if a model cannot be cut between modules or ``frontend="trace"`` asks for it. In: a model and an
example; out: an `ExportedGraph`, which must be the same on every rank.
"""

from __future__ import annotations

import copy
import linecache
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from arclight.fabric.modules import keeping_modes
from arclight.parallel.pipeline.splitting.proxy_modules import parameter_names
from arclight.parallel.plan import PlanError

_NO_DATA = "its data is not allocated"
"""What torch says where values of a tensor without memory are read."""
_LIBRARIES = ("/torch/", "/arclight/parallel/pipeline/", "<")


@dataclass(frozen=True)
class ExportedGraph:
    """A graph in torch's operations before differentiation, and what its placeholders stand for."""

    graph: fx.Graph
    parts: dict[str, nn.Module]
    """Graphs within the graph (regions without gradients, or in another precision), by their names."""
    states: dict[fx.Node, str]
    """Parameters and buffers, by the first of each one's names."""
    parameters: frozenset[fx.Node]
    persistent: frozenset[fx.Node]
    """States that are persistent buffers."""
    first: dict[str, str]
    """First name of each parameter or buffer, by each of its names."""
    constants: dict[fx.Node, Tensor]
    inputs: dict[fx.Node, int]
    """Leaves of ``(args, kwargs)``, by number."""
    results: tuple[Any, ...]
    """Leaves of the result: nodes, and what is no tensor as it is."""
    result_spec: TreeSpec
    frame: Frame

    @property
    def aliases(self) -> dict[str, str]:
        """Map each further name of a parameter or buffer to its first one."""
        return {name: first for name, first in self.first.items() if name != first}


@dataclass(frozen=True)
class Frame:
    """Conditions under which a traced graph is valid; anything else is refused."""

    name: str
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Leaves of the example: tensors without memory, and other values unchanged."""
    places: tuple[str, ...]
    skeleton: nn.Module
    """The model without memory, in the mode in which it was traced."""
    autocast: torch.dtype | None
    device: torch.device

    def __deepcopy__(self, memo: Any) -> Frame:
        return self  # nothing in it changes

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of the model's arguments.

        Raises PlanError for arguments that the graph does not hold for.
        """
        ordered = {key: kwargs[key] for key in self.spec.child(1).context if key in kwargs}
        leaves, spec = tree_flatten((tuple(args), ordered | dict(kwargs)))
        if spec != self.spec:
            raise PlanError(
                f"{self.name} was traced with arguments of the structure {self.spec}, and is called with {spec}: call it as the "
                'example says, or cut it with frontend="slice"'
            )
        for place, given, example in zip(self.places, leaves, self.leaves, strict=True):
            if _sort(given) != _sort(example):
                raise PlanError(
                    f"{place} of {self.name} is {_describe(given)}, and it was traced with {_describe(example)}: a traced graph is true for its "
                    'example only. Give micro-batches of that shape, split again with this example, or use frontend="slice"'
                )
        return leaves

    def refuse_precision(self) -> None:
        """Raise PlanError if autocast differs from that of the trace.

        Casts would happen that are not in the graph, or the other way round.
        """
        now = _autocast(self.device)
        if now != self.autocast:
            raise PlanError(
                f"{self.name} was traced {_precision(self.autocast)} and runs {_precision(now)}: split it within the same torch.autocast"
            )

    def refuse_mode(self, training: bool) -> None:
        """Raise PlanError if ``model.train(training)`` would change the mode of any module."""
        before = {name: module.training for name, module in self.skeleton.named_modules()}
        with keeping_modes(self.skeleton):
            self.skeleton.train(training)
            changed = [name for name, module in self.skeleton.named_modules() if module.training != before[name]]
        if changed:
            was, name = "eval" if training else "train", changed[-1]
            raise PlanError(
                f"{self.name} was traced in {was} mode{f' (so {name})' if name else ''}, which is written into its graph: "
                f'.{"train" if training else "eval"}() cannot change it. Split the model again in that mode, or use frontend="slice"'
            )


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedGraph:
    """Export the graph of ``model(*args, **kwargs)`` without computing anything.

    Nothing is changed, and the model may be on the meta device. Regions under ``torch.no_grad`` stay such. Raises
    PlanError, with the line of the model, for what a graph cannot say: control flow that depends on values, functions
    with a backward of their own, results that are no tensors, inputs that are written to.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    leaves, places, spec = _example(args, dict(kwargs), mode)
    example_args, example_kwargs = tree_unflatten(leaves, spec)
    with _errors_of(model), torch.enable_grad(), _silence():
        probe = _hollow(model, mode)
        with mode:
            _refuse_own_backward(model, probe(*example_args, **example_kwargs))
        program = torch.export.export(_hollow(model, mode), example_args, example_kwargs, strict=False)
        skeleton = _hollow(model, mode)
    tensors = (leaf for leaf in (*skeleton.parameters(), *leaves) if isinstance(leaf, Tensor))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    frame = Frame(type(model).__name__, spec, tuple(leaves), places, skeleton, _autocast(device), device)
    return _read(model, program, frame)


def _read(model: nn.Module, program: Any, frame: Frame) -> ExportedGraph:
    """Read the meaning of the placeholders and the result of an exported program."""
    first = first_names(model)
    states: dict[fx.Node, str] = {}
    parameters, persistent = set[fx.Node](), set[fx.Node]()
    constants: dict[fx.Node, Tensor] = {}
    inputs: dict[fx.Node, int] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            states[node] = first[spec.target]
            if spec.kind is InputKind.PARAMETER:
                parameters.add(node)
            elif spec.persistent:
                persistent.add(node)
        elif spec.kind is InputKind.USER_INPUT:
            inputs[node] = len(inputs)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[spec.target]
        else:
            raise PlanError(f"{frame.name} computes with {spec.target}, which is not a tensor: a traced graph cannot")
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise PlanError(f"{frame.name} changes something besides its result: a traced graph cannot")
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return ExportedGraph(
        program.graph, dict(program.graph_module.named_children()), states, frozenset(parameters), frozenset(persistent), first,
        constants, inputs, tuple(output.args[0]), program.call_spec.out_spec, frame,
    )  # fmt: skip


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter's and buffer's names to its first one.

    Raises PlanError for two that share memory.
    """
    names, _ = parameter_names(model)
    for name, first in names.items():
        if model.get_parameter(name) is not model.get_parameter(first):
            raise PlanError(
                f"{first} and {name} are two parameters over one memory: make them one (b.weight = a.weight)"
            )
    found: dict[int, str] = {}
    buffers = model.named_buffers(remove_duplicate=False)
    return names | {name: found.setdefault(id(buffer), name) for name, buffer in buffers}


# -- a model and an example without memory ---------------------------------------------------------------------------


def _hollow(model: nn.Module, mode: Any) -> nn.Module:
    """Return a copy with fake parameters and buffers, which have shapes and no memory.

    They are on the device of the model's (meta counts as the CPU).
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_fake(parameter, mode), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode)
    return copy.deepcopy(model, memo)


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    with mode:
        device = "cpu" if tensor.is_meta else tensor.device
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _example(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> tuple[list[Any], tuple[str, ...], TreeSpec]:
    given = (args, kwargs)
    paths, spec = tree_flatten_with_path(tree_map_only(Tensor, lambda tensor: _fake(tensor, mode), given))
    outer = {keystr((SequenceKey(0),)): "args", keystr((SequenceKey(1),)): "kwargs"}
    places = tuple(f"{outer[keystr(path[:1])]}{keystr(path[1:])}" for path, _ in paths)
    return [leaf for _, leaf in paths], places, spec


def _sort(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _autocast(device: torch.device) -> torch.dtype | None:
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _precision(dtype: torch.dtype | None) -> str:
    return "without torch.autocast" if dtype is None else f"under torch.autocast to {dtype}"


# -- what tracing would lose, and errors that say where --------------------------------------------------------------


def _refuse_own_backward(model: nn.Module, result: Any) -> None:
    """Raise PlanError if gradients of ``result`` pass through a user's autograd function.

    A trace has its forward only.
    """
    waiting = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        step = waiting.pop()
        if isinstance(step, BackwardCFunction):
            raise PlanError(
                f"{type(model).__name__} uses {type(step).__name__.removesuffix('Backward')}, an autograd function with a backward of its "
                "own, which a traced graph would lose: put it into a module with the parameters next to it and use "
                'frontend="slice"'
            )
        for before, _ in step.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence logging for the block.

    Torch prints the whole graph if it cannot go on; the error says what matters.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _errors_of(model: nn.Module) -> Iterator[None]:
    """Turn errors of tracing into PlanErrors that name the user's line."""
    name = type(model).__name__
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        if not (isinstance(error, GuardOnDataDependentSymNode) or _NO_DATA in str(error)):
            lines = str(error).strip().splitlines()
            hint = ": call it with use_cache=False" if "Cache" in str(error) else ""
            first = f"{type(error).__name__}: {lines[0] if lines else ''}{hint}"
            raise PlanError(f"{name} cannot be traced{_place(error)}: {first}") from error
        raise PlanError(
            f"{name} goes a way that depends on values of tensors, which no graph has{_place(error)}: write it with torch.where or torch.cond; "
            'or put it into a module with the parameters next to it and use frontend="slice", which runs the real code of a module'
        ) from error


def _place(error: BaseException) -> str:
    """Return ``" (model.py:12: if x.sum() > 0:)"``, of the innermost line that is the user's."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in _LIBRARIES)
    ]
    inner = [f for f in frames if f.name not in ("<module>", "<lambda>")] or frames
    if not inner:
        return ""
    line = linecache.getline(inner[-1].filename, inner[-1].lineno or 0).strip()
    return f" ({Path(inner[-1].filename).name}:{inner[-1].lineno}: {line})"
