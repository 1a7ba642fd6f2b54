"""Stages of a traced graph: for forwards whose modules cannot be cut, because they compute with parameters between them.

A stage has the model's own parameters under their names, and no modules that could be called: shapes, mode and precision are those
of the example, and anything else is refused when it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import TreeSpec, tree_unflatten

from arclight.parallel.pipeline.exporting import Exported, Frame, export
from arclight.parallel.pipeline.graph import UnitGraph, Value
from arclight.parallel.pipeline.traced_calls import TracedCalls, find_calls
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class _Program:
    """What a stage computes, as a graph whose placeholders are what it receives, inputs, states and constants, in this order."""

    number: int
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    module: fx.GraphModule
    inputs: list[int]
    states: list[str]
    constants: list[Tensor]
    result_spec: TreeSpec | None


class TracedStage(nn.Module):
    """One stage: its part of the graph, over the model's live parameters under all of their names.

    ``forward(*received, args=..., kwargs=...)`` takes what :attr:`receives` lists and the whole model's arguments, and gives what
    :attr:`sends` lists, or the model's own result on the last stage. Raises PlanError for other shapes, precision or mode
    than those of the example.
    """

    def __init__(
        self, model: nn.Module, program: _Program, owned: tuple[str, ...], names: Mapping[str, str], frame: Frame
    ) -> None:
        """owned: first names of parameters and buffers. names: for all names their first ones."""
        super().__init__()
        self.number, self.receives, self.sends = program.number, program.receives, program.sends
        self._frame, self._program = frame, program
        self._programs = {frame.device: program.module}
        self._dtypes: dict[str, torch.dtype] = {}
        for name, first in names.items():
            if first in owned:
                tensor = _at(model, first)
                self._dtypes[first] = tensor.dtype
                _put(self, name, tensor, persistent=_is_persistent(model, name))
        super().train(frame.skeleton.training)

    def forward(self, *received: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        program, frame = self._program, self._frame
        if len(received) != len(self.receives):
            raise PlanError(f"stage {self.number} receives {len(self.receives)} tensors and was given {len(received)}")
        leaves = frame.flatten(args, kwargs or {})
        inputs = [leaves[at] for at in program.inputs]
        states = [_at(self, name) for name in program.states]
        for name, state in zip(program.states, states, strict=True):
            if state.dtype != self._dtypes[name]:
                raise PlanError(
                    f"{name} is {state.dtype}, and was traced as {self._dtypes[name]}, which is written into the graph of stage "
                    f"{self.number}: split the model again in this precision"
                )
        frame.refuse_precision()
        tensors = (value for value in (*states, *received, *inputs) if isinstance(value, Tensor))
        device = next((tensor.device for tensor in tensors), frame.device)
        constants = [constant.to(device) if constant.ndim else constant for constant in program.constants]
        out = self._on(device)(*received, *inputs, *states, *constants)
        return out if program.result_spec is None else tree_unflatten(list(out), program.result_spec)

    def train(self, mode: bool = True) -> TracedStage:
        """Raises PlanError unless that is the mode of the trace."""
        self._frame.refuse_mode(mode)
        return super().train(mode)

    def _on(self, device: torch.device) -> fx.GraphModule:
        """The graph where tensors that it makes (masks, positions) are made on ``device``."""
        if device not in self._programs:
            self._programs[device] = _moved(self._program.module, self._frame.device, device)
        return self._programs[device]


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """``model(*args, **kwargs)`` as a graph that can be cut.

    The model is not changed, and may be on the meta device; so may the arguments. Raises PlanError, naming the user's line, for what
    a graph cannot say (see :func:`~arclight.parallel.pipeline.exporting.export`).
    """
    exported = export(model, args, kwargs)
    return TracedModel(model, exported, find_calls(exported))


class TracedModel:
    """A model whose forward is a graph of operations, in calls that stages can be made of."""

    def __init__(self, model: nn.Module, exported: Exported, calls: TracedCalls) -> None:
        self.model, self.exported, self.calls = model, exported, calls

    @property
    def graph(self) -> UnitGraph:
        return self.calls.graph

    def stages(self, cuts: Sequence[int]) -> list[TracedStage]:
        """A stage from each of ``cuts`` (numbers of calls, the first is 0) to the next. They share the model's live parameters."""
        ranges = self.graph.ranges(cuts)
        programs = [self._program(number, begin, end, len(ranges)) for number, (begin, end) in enumerate(ranges)]
        owned = [dict.fromkeys(program.states) for program in programs]
        self._place_unused(owned)
        return [
            TracedStage(self.model, program, tuple(names), self.exported.first, self.exported.frame)
            for program, names in zip(programs, owned, strict=True)
        ]

    def _place_unused(self, owned: list[dict[str, None]]) -> None:
        """Buffers that this mode does not use (counts of batches) lie where their modules' other tensors do."""
        used = {name for names in owned for name in names}
        for name in dict.fromkeys(self.exported.first.values()):
            if name in used:
                continue
            module = name.rpartition(".")[0]
            beside = (n for n, names in enumerate(owned) if any(other.rpartition(".")[0] == module for other in names))
            owned[next(beside, 0)][name] = None

    def _program(self, number: int, begin: int, end: int, stages: int) -> _Program:
        """The graph of the calls from ``begin`` to ``end``, and what goes into it."""
        exported, calls = self.exported, self.calls
        last = number == stages - 1
        receives, sends = self.graph.live(begin), () if last else self.graph.live(end)
        results = [leaf for leaf in exported.results if isinstance(leaf, fx.Node)] if last else []
        members = {node for part in calls.members[begin:end] for node in part}
        received = {calls.nodes[value] for value in receives}
        wanted = members | self._glue_for(members, {node for node in results if node not in received})
        graph, given = fx.Graph(), dict[fx.Node, fx.Node]()
        for value in receives:
            given[calls.nodes[value]] = graph.placeholder(f"received_{value.call}_{value.leaf}")
        used = {before for node in wanted for before in node.all_input_nodes} | set(results)
        sources: dict[str, list[fx.Node]] = {}
        for kind in ("inputs", "states", "constants"):
            sources[kind] = [node for node in getattr(exported, kind) if node in used]
            given |= {node: graph.placeholder(node.name) for node in sources[kind]}
        for node in exported.graph.nodes:  # also those of calls: they are in order
            if node in wanted:
                given[node] = graph.node_copy(node, given.__getitem__)
        out = [given[calls.nodes[value]] for value in sends] if not last else [
            given[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in exported.results
        ]  # fmt: skip
        graph.output(tuple(out))
        return _Program(
            number, receives, sends, fx.GraphModule(exported.parts, graph),
            [exported.inputs[node] for node in sources["inputs"]],
            [exported.states[node] for node in sources["states"]],
            [exported.constants[node] for node in sources["constants"]],
            exported.result_spec if last else None,
        )  # fmt: skip

    def _glue_for(self, members: set[fx.Node], results: set[fx.Node]) -> set[fx.Node]:
        """What belongs to no call and is needed by these operations, with all that writes to it."""
        glue, found = set(self.calls.glue), set[fx.Node]()
        waiting = [before for node in members for before in node.all_input_nodes] + list(results)
        while waiting:
            node = waiting.pop()
            if node in glue and node not in found:
                found.add(node)
                waiting += [*node.all_input_nodes, *self.calls.written.get(node, ())]
        return found


def _moved(module: fx.GraphModule, before: torch.device, after: torch.device) -> fx.GraphModule:
    """A copy that makes its tensors on another device, and so do the graphs within it."""

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


def _at(module: nn.Module, name: str) -> Tensor:
    *path, last = name.split(".")
    for part in path:
        module = module._modules[part]  # type: ignore[assignment]
    tensor: Tensor = getattr(module, last)
    return tensor


def _put(module: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    """Register ``tensor`` under a dotted name, below modules that hold and compute nothing."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=persistent)


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last not in model.get_submodule(path)._non_persistent_buffers_set
