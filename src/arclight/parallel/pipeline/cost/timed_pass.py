"""Run one forward and backward call by call, timing each, to learn costs.

`measure` runs it on real or fake tensors; `forecast` uses its `storage_key`. In: a model, its call graph and an example; out: seconds and bytes
of each call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from arclight.parallel.op_recorder import OpRecorder
from arclight.parallel.pipeline.call_graph import Arguments, CallGraph, Value
from arclight.parallel.plan import PlanError

Phases = tuple[float, float, float]
"""Seconds of F, I and W."""


class Meter(Protocol):
    """Measure seconds: by a clock, or by the roofline model."""

    def begin(self) -> None: ...

    def seconds(self) -> float:
        """Return the seconds since :meth:`begin`."""


@dataclass
class Clock:
    """Seconds by ``now``, with a wait until ``device`` is done at both ends."""

    device: torch.device
    now: Callable[[], float]
    began: float = 0.0

    def begin(self) -> None:
        self._wait()
        self.began = self.now()

    def seconds(self) -> float:
        self._wait()
        return self.now() - self.began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass
class Roofline:
    """Predicted seconds of the operations that ``recorder`` has seen."""

    recorder: OpRecorder

    def begin(self) -> None:
        self.recorder.begin()

    def seconds(self) -> float:
        return self.recorder.work().seconds


OnCall = Callable[[list[Tensor], list[Tensor], list[nn.Parameter]], object]
"""Called after each call with its outputs, its inputs from earlier calls and its parameters: of all, the tensors that require a gradient."""


@dataclass
class PassResult:
    """Measurements of a pass, for each call of the graph."""

    phases: list[Phases]
    """Seconds of forward (F), backward of inputs (I) and of weights (W)."""
    held: list[int]
    """Bytes kept for backward; zeros if nothing was counted."""
    outputs: list[tuple[int, ...]]
    """Bytes of each leaf that a call gave, 0 for what is no tensor."""


@dataclass
class Pass:
    """One forward of the model, with a backward of each call after it."""

    model: nn.Module
    function: Callable[..., Any]
    """Function of the model that is run."""
    graph: CallGraph
    meter: Meter
    saving: bool = False
    """Whether to count the bytes kept for backward (which takes time itself)."""
    seen: OnCall | None = None
    phases: list[Phases] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    values: dict[Value, Tensor] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    """Storages of parameters, arguments and what earlier calls gave."""
    passed: list[Tensor] = field(default_factory=list)
    """What earlier calls gave: alive, so that no other storage is taken for theirs."""
    saved: dict[int, Tensor] = field(default_factory=dict)
    depth: int = 0

    def run(self, arguments: Arguments) -> PassResult:
        modules = dict.fromkeys(self.model.get_submodule(call.name) for call in self.graph.calls)
        inside = (*self.model.parameters(), *self.model.buffers(), *tree_leaves(arguments))
        self.known = {storage_key(x) for x in inside if isinstance(x, Tensor)}
        with ExitStack() as stack:
            for module in modules:
                hooks = module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._over)
                for handle in hooks:
                    stack.callback(handle.remove)
            stack.enter_context(torch.enable_grad())
            if self.saving:
                stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            self.meter.begin()
            result = self.function(*arguments[0], **arguments[1])
            if len(self.phases) != len(self.graph.calls):
                raise PlanError(
                    f"the forward made {len(self.phases)} of the {len(self.graph.calls)} calls of the graph: capture the model again"
                )
            self._end(result)
        return PassResult(self.phases, self.held, self.outputs)

    def _enter(self, module: nn.Module, given: Any) -> None:
        self.depth += 1

    def _over(self, module: nn.Module, given: Any, output: Any) -> Any:
        self.depth -= 1
        if self.depth:  # within another unit
            return None
        number, calls = len(self.phases), self.graph.calls
        if number == len(calls) or self.model.get_submodule(calls[number].name) is not module:
            name = next(name for name, other in self.model.named_modules() if other is module)
            expected = calls[number].name if number < len(calls) else "nothing more"
            raise PlanError(f"the forward calls {name} where the graph has {expected}: capture the model again")
        reads = [self.values[value] for value in calls[number].reads if value in self.values]
        self.phases.append(self._phases(output, reads, calls[number].parameters))
        if self.seen is not None:
            self.seen(*self._differentiable(output, reads, calls[number].parameters))
        return self._pass_on(number, output)

    def _end(self, result: Any) -> None:
        """Charge what follows the last call to it."""
        reads = [self.values[value] for value in self.graph.result if value in self.values]
        forward, inputs, weights = self._phases(result, reads, self.graph.result_parameters)
        f, i, w = self.phases[-1]
        self.phases[-1] = (f + forward, i + inputs, w + weights)
        self.held[-1] += self._new_bytes()

    def _phases(self, output: Any, reads: list[Tensor], parameters: tuple[str, ...]) -> Phases:
        forward = self.meter.seconds()
        outputs, before, own = self._differentiable(output, reads, parameters)
        inputs = self._backward(outputs, before)
        both = self._backward(outputs, [*before, *own]) if own else inputs
        return forward, inputs, max(0.0, both - inputs)

    def _differentiable(
        self, output: Any, reads: list[Tensor], parameters: tuple[str, ...]
    ) -> tuple[list[Tensor], list[Tensor], list[nn.Parameter]]:
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        own = [p for p in map(self.model.get_parameter, parameters) if p.requires_grad]
        return outputs, [x for x in reads if x.requires_grad], own

    def _backward(self, outputs: list[Tensor], by: list[Tensor]) -> float:
        if not outputs or not by:
            return 0.0
        gradients = [torch.ones_like(x) for x in outputs]
        self.meter.begin()
        # Glue that several calls read (a mask, a position) is gone through once for each.
        torch.autograd.grad(outputs, by, gradients, retain_graph=True, allow_unused=True)
        return self.meter.seconds()

    def _pass_on(self, number: int, output: Any) -> Any:
        """Return the outputs as new leaves; whatever works in place on them does so on a copy."""
        leaves, structure = tree_flatten(output)
        self.outputs.append(tuple(x.nbytes if isinstance(x, Tensor) else 0 for x in leaves))
        new: list[Any] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                new.append(leaf)
                continue
            value = leaf.detach()
            self.values[Value(number, index)] = value.requires_grad_(leaf.requires_grad)
            new.append(value.clone() if leaf.requires_grad else value)
            if self.saving:
                self.saved.setdefault(storage_key(leaf), leaf)
        self.held.append(self._new_bytes())
        if self.saving:
            self.passed += [x for x in (*leaves, *new) if isinstance(x, Tensor)]
            self.known.update(map(storage_key, self.passed))
        self.saved.clear()
        self.meter.begin()
        return tree_unflatten(new, structure)

    def _new_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for key, x in self.saved.items() if key not in self.known)

    def _save(self, tensor: Tensor) -> Tensor:
        self.saved.setdefault(storage_key(tensor), tensor)
        return tensor


def storage_key(tensor: Tensor) -> int:
    """Identify the memory of ``tensor``."""
    return int(tensor.untyped_storage()._cdata)
