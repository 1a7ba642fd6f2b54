"""Interpret the proxied calls of one stage: return received values, call own modules.

`SlicedModule` runs a stage by a `StageInterpreter`. Calls are matched with those of `capture` by their order: it must not call what the
capture did not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from arclight.parallel.pipeline.call_graph import Value
from arclight.parallel.pipeline.splitting.output_specs import OutputSpecs
from arclight.parallel.pipeline.splitting.placeholder_tensor import placeholders_in
from arclight.parallel.pipeline.splitting.proxy_modules import ModuleProxy
from arclight.parallel.pipeline.splitting.stage_assignment import StageAssignment
from arclight.parallel.plan import PlanError


class StageDone(BaseException):
    """The stage has all that it computes. No Exception: code of models must not catch it."""


@dataclass
class StageRun:
    """One forward of one stage."""

    begin: int
    end: int
    received: dict[Value, Tensor]
    kept: dict[Value, Any] = field(default_factory=dict)
    next: int = 0
    differentiated: bool = field(default_factory=torch.is_grad_enabled)


def _refuse_reentrant(path: str) -> None:
    """Raise PlanError within a reentrant checkpoint.

    It switches gradients off, so that what is sent on from there would have none.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and frame.f_code.co_name == "forward":
            raise PlanError(
                f"{path} is called within a reentrant checkpoint, out of which no gradient leads to other stages: give it use_reentrant=False"
            )
        frame = frame.f_back


def _by_call(values: Sequence[Value]) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for value in values:
        found.setdefault(value.call, []).append(value)
    return found


class StageInterpreter:
    """Takes the calls in the tree of one stage."""

    def __init__(self, assignment: StageAssignment, number: int, output_specs: OutputSpecs) -> None:
        self.assignment, self.number, self.output_specs = assignment, number, output_specs
        self.begin, self.end = assignment.range(number)
        graph = assignment.graph
        self.changed = graph.rewritten.union(*(call.modifies for call in graph.calls))
        self.receives, self.sends = assignment.values_into(number), assignment.values_into(number + 1)
        self.received = _by_call(self.receives)
        self.sent = _by_call(self.sends)
        self.received_of: dict[int, list[Value]] = {}
        for value in self.receives:
            self.received_of.setdefault(value.call, []).append(value)
        self.training = True
        self.run: StageRun | None = None
        self.own: dict[str, tuple[nn.Module, str]] = {}
        """Parent module and name there of each part, by its path; the part may be wrapped or replaced later."""

    def call(self, proxy: ModuleProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, path = self.run, proxy.proxy_path
        if run is None:
            if path not in self.own:
                raise PlanError(f"{path} is called outside of a forward of stage {self.number}")
            parent, name = self.own[path]
            return parent._modules[name](*args, **kwargs)  # type: ignore[misc]  # a checkpoint around it computes it again
        if run.differentiated and not torch.is_grad_enabled():
            _refuse_reentrant(path)
        number, calls = run.next, self.assignment.graph.calls
        if number >= len(calls) or calls[number].name != path:
            expected = calls[number].name if number < len(calls) else "none"
            raise PlanError(
                f"call {number} of the model is of {path}, but was of {expected} for the example arguments: a model that is cut must "
                "take the same way for all arguments, and in training as in evaluation"
            )
        run.next += 1
        if number < run.begin:
            return self._foreign(run, number, path, args, kwargs)
        lacking = next(placeholders_in((args, kwargs)), None)
        if lacking is not None:
            raise PlanError(
                f"{path} on stage {self.number} needs what {lacking.of} returned, and the example arguments did not show that: a model "
                "that is cut must take the same way for all arguments"
            )
        parent, name = self.own[path]
        kept = self._keep(run, number, parent._modules[name](*args, **kwargs))  # type: ignore[misc]
        if run.next == run.end < len(calls):
            raise StageDone
        return kept

    def real(self, proxy: ModuleProxy) -> nn.Module | None:
        if self.run is None or not self.begin <= self.run.next < self.end or proxy.proxy_path not in self.own:
            return None
        parent, name = self.own[proxy.proxy_path]
        return parent._modules[name]

    def _foreign(self, run: StageRun, number: int, path: str, args: Any, kwargs: Any) -> Any:
        spec = self.output_specs.find(path, self.training, args, kwargs)
        leaves = list(spec.leaves)
        for value in self.received_of.get(number, ()):
            given = run.received[value]
            leaves[value.leaf] = given.clone() if value in self.changed else given
        return tree_unflatten(leaves, spec.structure)

    def _keep(self, run: StageRun, number: int, result: Any) -> Any:
        values = self.sent.get(number)
        if not values:
            return result
        if isinstance(result, Tensor):
            run.kept[values[0]] = result
            return result.clone() if values[0] in self.changed else result
        leaves, structure = tree_flatten(result)
        for value in values:
            leaf = run.kept[value] = leaves[value.leaf]
            if value in self.changed:
                leaves[value.leaf] = leaf.clone()
        return tree_unflatten(leaves, structure)


class StageModuleTree:
    """The tree that one stage calls, and what must be brought into it for each run."""

    root: nn.Module

    def __init__(self, stage: StageInterpreter) -> None:
        self.stage = stage
        self.modes: list[tuple[nn.Module, nn.Module]] = []
        self.absent: list[tuple[nn.Module, str]] = []
        self.live: list[tuple[nn.Module, str, nn.Module]] = []
        self.bound: list[tuple[nn.Module, str, Value]] = []
        self.lent: list[tuple[nn.Module, str, Value]] = []

    def sync(self, values: Mapping[Value, Tensor]) -> None:
        """Set modes and parameters of the tree to those of the process's modules now.

        Others may have moved or gathered these.
        """
        for module, original in self.modes:
            module.__dict__["training"] = original.training
        for module, name, original in self.live:
            module._parameters[name] = original._parameters[name]
        for module, name, value in self.bound:
            module._parameters[name] = values[value]  # type: ignore[assignment]

    @contextmanager
    def lending(self, values: Mapping[Value, Tensor]) -> Iterator[None]:
        """Lend transmitted parameters to parts for the block.

        They keep the last ones, which a recomputation in backward needs.
        """
        held = []
        for module, name, value in self.lent:
            if name in module._parameters:
                held.append((module, name, module._parameters[name]))
                module._parameters[name] = values[value]  # type: ignore[assignment]
            else:
                module.__dict__[name] = values[value]
        try:
            yield
        finally:
            for module, name, before in held:
                module._parameters[name] = before
            for module, name, value in self.lent:
                if name not in module._parameters:
                    sent = values[value]
                    module.__dict__[name] = sent.detach().requires_grad_(sent.requires_grad)
