"""Define stages of a traced graph, for forwards that use parameters between their modules.

`split` makes these if the model cannot be sliced by its modules, or if ``frontend="trace"`` asks for it. A stage has the model's own parameters
under their names, and no modules that could be called: shapes, mode and precision are those of the example, and anything else is refused when
it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, tree_unflatten

from arclight.parallel.pipeline.call_graph import CallGraph, Value
from arclight.parallel.pipeline.splitting import global_rng
from arclight.parallel.pipeline.splitting.stage_assignment import PARAMETER_CALL, StageAssignment
from arclight.parallel.pipeline.splitting.stage_info import NamePreservingStage, StageInfo
from arclight.parallel.pipeline.splitting.traced.export_graph import ExportedGraph, Frame, export
from arclight.parallel.pipeline.splitting.traced.graph_calls import TracedCalls, find_calls
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class _Program:
    """Graph of a stage; its placeholders are received values, inputs, states and constants."""

    number: int
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    module: fx.GraphModule
    inputs: list[int]
    states: list[str]
    constants: list[Tensor]
    result_spec: TreeSpec | None

    def __deepcopy__(self, memo: Any) -> _Program:
        return self  # nothing in it changes


class TracedStage(NamePreservingStage):
    """Stage of a traced graph over the model's live parameters, under all of their names.

    ``forward(*received, args=..., kwargs=...)`` takes what :attr:`receives` lists and the whole model's arguments, and gives what
    :attr:`sends` lists, or the model's own result on the last stage. Raises PlanError for other shapes, precision or mode
    than those of the example.
    """

    def __init__(
        self, model: nn.Module, program: _Program, owned: Collection[str], names: Mapping[str, str], frame: Frame
    ) -> None:
        """Initialise the stage from its program.

        owned: first names of parameters and buffers. names: for all names their first ones.
        """
        super().__init__(StageInfo(program.number, program.receives, program.sends))
        self._frame, self._program = frame, program
        self._programs = {frame.device: program.module}
        self._dtypes: dict[str, torch.dtype] = {}
        self._tied: dict[str, str] = {}
        for name, first in names.items():
            if first in owned:
                tensor = _at(model, first)
                self._dtypes[first] = tensor.dtype
                if name != first and isinstance(tensor, nn.Parameter):
                    self._tied[name] = first
                _put(self, name, tensor, persistent=_is_persistent(model, name))
        super().train(frame.skeleton.training)

    def forward(self, *received: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        program, frame = self._program, self._frame
        if len(received) != len(program.receives):
            raise PlanError(
                f"stage {program.number} receives {len(program.receives)} tensors and was given {len(received)}"
            )
        leaves = frame.flatten(args, kwargs or {})
        inputs = [leaves[at] for at in program.inputs]
        states = [_at(self, name) for name in program.states]
        for name, state in zip(program.states, states, strict=True):
            if state.dtype != self._dtypes[name]:
                raise PlanError(
                    f"{name} is {state.dtype}, and was traced as {self._dtypes[name]}, which is written into the graph of stage "
                    f"{program.number}: split the model again in this precision"
                )
        frame.refuse_precision()
        tensors = (value for value in (*states, *received, *inputs) if isinstance(value, Tensor))
        device = next((tensor.device for tensor in tensors), frame.device)
        constants = [constant.to(device) if constant.ndim else constant for constant in program.constants]
        out = self._on(device)(*received, *inputs, *states, *constants)
        if program.result_spec is not None:
            return tree_unflatten(list(out), program.result_spec)
        return tuple(tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor for tensor in out)

    def train(self, mode: bool = True) -> TracedStage:
        """Set the mode, which must be that of the trace; raise PlanError for another."""
        self._frame.refuse_mode(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> TracedStage:
        super()._apply(fn, recurse)
        for name, first in self._tied.items():
            _put(self, name, _at(self, first), persistent=True)
        return self

    def extra_repr(self) -> str:
        known = self._stage_info
        return f"stage {known.number} of a traced graph, receives {len(known.receives)}, sends {len(known.sends)}"

    def _on(self, device: torch.device) -> fx.GraphModule:
        """Return the graph where tensors that it makes (masks, positions) are made on ``device``."""
        if device not in self._programs:
            self._programs[device] = _moved(self._program.module, self._frame.device, device)
        return self._programs[device]


def trace_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """Return ``model(*args, **kwargs)`` as a graph that can be cut.

    The model is not changed, and may be on the meta device; so may the arguments. Raises PlanError, naming the user's line, for what
    a graph cannot say (see :func:`~arclight.parallel.pipeline.splitting.traced.export_graph.export`).
    """
    before = global_rng.global_rng_state()
    exported = export(model, args, kwargs)
    if global_rng.global_rng_state() != before:
        raise PlanError(f"a graph would compute with the same numbers forever: {global_rng.GLOBAL_RNG_ADVICE}")
    return TracedModel(model, exported, find_calls(exported))


class TracedModel:
    """A model whose forward is a graph of operations, in calls that stages can be made of."""

    def __init__(self, model: nn.Module, exported: ExportedGraph, calls: TracedCalls) -> None:
        self.model, self.exported, self.calls = model, exported, calls

    @property
    def graph(self) -> CallGraph:
        return self.calls.graph

    def refuse_inside(self, names: Sequence[str]) -> None:
        """Raise PlanError for a module before which no cut can be, though it is called."""
        for name in names:
            begun = [call.name for call in self.graph.calls]
            reasons = [why for inner, why in self.calls.inside.items() if _within(inner, name)]
            if reasons and not any(_within(inner, name) for inner in begun):
                raise PlanError(
                    f"no stage can begin with {name}: {reasons[0]}, and that is within one stage. Cut elsewhere"
                )

    def stages(self, assignment: StageAssignment | Sequence[int]) -> list[TracedStage]:
        """Return the stages of ``assignment``, which share the model's live parameters.

        Instead of an assignment, the first call of each stage may be given; the first is 0.
        """
        if not isinstance(assignment, StageAssignment):
            assignment = StageAssignment.cut(self.graph, assignment)
        programs = [self._program(assignment, number) for number in range(len(assignment.first_calls))]
        owned = [assignment.parameters(number) | set(program.states) for number, program in enumerate(programs)]
        self._place_unused(owned)
        names, frame = self.exported.first, self.exported.frame
        return [
            TracedStage(self.model, program, mine, names, frame)
            for program, mine in zip(programs, owned, strict=True)
        ]  # fmt: skip

    def _place_unused(self, owned: list[set[str]]) -> None:
        """Assign unused buffers (counts of batches) to the stages of their modules' tensors."""
        used = set().union(*owned)
        for name, _ in self.model.named_buffers():
            if name not in used:
                module = name.rpartition(".")[0]
                beside = (n for n, names in enumerate(owned) if any(o.rpartition(".")[0] == module for o in names))
                owned[next(beside, 0)].add(name)

    def _program(self, assignment: StageAssignment, number: int) -> _Program:
        """Return the graph of one stage, and what goes into it."""
        exported, calls = self.exported, self.calls
        last = number == len(assignment.first_calls) - 1
        receives, sends = assignment.values_into(number), assignment.values_into(number + 1)
        results = [leaf for leaf in exported.results if isinstance(leaf, fx.Node)] if last else []
        graph, given, arrived = fx.Graph(), dict[fx.Node, fx.Node](), dict[Value, fx.Node]()
        for value in receives:
            arrived[value] = graph.placeholder(
                f"received_{value.leaf}" if value.call == PARAMETER_CALL else str(calls.nodes[value])
            )
            given |= dict.fromkeys(self._nodes(assignment, value), arrived[value])
        begin, end = assignment.range(number)
        members = {node for part in calls.members[begin:end] for node in part}
        wanted = members | self._glue_for(members, {node for node in results if node not in given})
        used = {before for node in wanted for before in node.all_input_nodes} | set(results)
        used.update(node for value in sends if value.call == PARAMETER_CALL for node in self._nodes(assignment, value))
        sources: dict[str, list[fx.Node]] = {}
        for kind in ("inputs", "states", "constants"):
            sources[kind] = [node for node in getattr(exported, kind) if node in used and node not in given]
            given |= {node: graph.placeholder(node.name) for node in sources[kind]}
        for node in exported.graph.nodes:  # also those of calls: they are in order
            if node in wanted:
                given[node] = graph.node_copy(node, given.__getitem__)
        out = [given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in exported.results] if last else [
            arrived[value] if value in arrived else given[self._nodes(assignment, value)[0]] for value in sends
        ]  # fmt: skip
        graph.output(tuple(out))
        return _Program(
            number, receives, sends, fx.GraphModule(exported.parts, graph),
            [exported.inputs[node] for node in sources["inputs"]],
            [exported.states[node] for node in sources["states"]],
            [exported.constants[node] for node in sources["constants"]],
            exported.result_spec if last else None,
        )  # fmt: skip

    def _nodes(self, assignment: StageAssignment, value: Value) -> list[fx.Node]:
        """Find a value in the whole graph: a result, or all nodes of a transmitted parameter."""
        if value.call != PARAMETER_CALL:
            return [self.calls.nodes[value]]
        return [node for node, name in self.exported.states.items() if name == assignment.transmitted[value.leaf]]

    def _glue_for(self, members: set[fx.Node], results: set[fx.Node]) -> set[fx.Node]:
        """Collect what belongs to no call and these operations need, with all that writes to it."""
        glue, found = set(self.calls.glue), set[fx.Node]()
        waiting = [before for node in members for before in node.all_input_nodes] + list(results)
        while waiting:
            node = waiting.pop()
            if node in glue and node not in found:
                found.add(node)
                waiting += [*node.all_input_nodes, *self.calls.written.get(node, ())]
        return found


def _moved(module: fx.GraphModule, before: torch.device, after: torch.device) -> fx.GraphModule:
    """Return a copy that makes its tensors on another device, and so do the graphs within it."""

    def move(value: Any) -> Any:
        return after if isinstance(value, torch.device) and value == before else value

    graph, given = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copied = given[node] = graph.node_copy(node, given.__getitem__)
        copied.args, copied.kwargs = map_aggregate(copied.args, move), map_aggregate(copied.kwargs, move)
    parts = {
        name: _moved(part, before, after) for name, part in module.named_children() if isinstance(part, fx.GraphModule)
    }
    return fx.GraphModule(parts, graph)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _at(module: nn.Module, name: str) -> Tensor:
    *path, last = name.split(".")
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]
    tensor = module._parameters[last] if last in module._parameters else module._buffers[last]
    assert tensor is not None
    return tensor


def _put(module: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    """Register ``tensor`` under a dotted name, below modules that hold and compute nothing."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = nn.Module()  # under any name, also one that means something of a stage
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
        return
    module._buffers[last] = tensor
    if not persistent:
        module._non_persistent_buffers_set.add(last)


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set
