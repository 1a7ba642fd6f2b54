"""A model as a chain - its first part, its blocks, its last part with the loss - and what each link costs one process.

Links are traced with fake tensors, one of each kind, when a plan first asks for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arclight.parallel.expert import expert_layers
from arclight.parallel.plan import PlanError
from arclight.parallel.planning.devices import TABLE, Hardware
from arclight.parallel.planning.local import Cut, localize, replicated
from arclight.parallel.planning.trace import Recorder, Work
from arclight.parallel.units import blocks

Recompute = Literal["none", "selective", "full"]
"""What blocks compute again in backward: see `Plan.activation_checkpointing`."""


@dataclass(frozen=True)
class Workload:
    """What is trained, as far as a planner must know.

    model: builds it (called under the meta device). batch(samples, sequence): one micro-batch. loss(model, batch): its loss.
    samples: of one step, over all processes. sequence: tokens of a sample.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    samples: int
    sequence: int
    compute: torch.dtype = torch.bfloat16
    """Of products and of gathered weights; the weights that are kept, gradients and moments are float32."""
    compiled: bool = True
    """Whether blocks are compiled: then what is no matrix product is fused, and computed again where that is cheaper than keeping it."""
    moments: int = 2
    """Tensors that the optimizer keeps of each parameter (2 for Adam)."""
    device: Hardware = TABLE["h100"]


@dataclass(frozen=True)
class Cost:
    """One link for one micro-batch on one process. Bytes."""

    held: int
    """What forward leaves for backward, its output included."""
    forward_peak: int
    """Most bytes in forward, above what was there before."""
    backward_peak: int
    """Most bytes in backward, above what was there before forward; gradients of the whole link included."""
    forward: Work
    backward: Work
    output: int
    """What it hands to the next link."""

    def line_to(self, other: Cost, at: float) -> Cost:
        """What lies on the line through this (0) and ``other`` (1), at ``at``."""
        names = ("held", "forward_peak", "backward_peak", "output")
        sizes = {name: round(getattr(self, name) + at * (getattr(other, name) - getattr(self, name))) for name in names}
        forward, backward = self.forward.line_to(other.forward, at), self.backward.line_to(other.backward, at)
        return Cost(forward=forward, backward=backward, **sizes)


@dataclass(frozen=True)
class Parameters:
    """Shapes of a link's parameters on one process of the tensor-parallel dimension, before they are spread further."""

    shapes: tuple[tuple[int, ...], ...]
    replicated: tuple[tuple[int, ...], ...]
    """Those of them whose gradients are summed over that dimension."""
    experts: tuple[tuple[int, ...], ...] = ()
    """Those of experts that ``ep`` shares out, and that FSDP spreads over fewer processes."""

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in (*self.shapes, *self.experts))


LINEAR = 2048
"""Tokens at which, and at half of which, the first and the last part are traced: what lies outside of blocks is linear in them."""


class Chain:
    """The links of a workload's model: "first", then numbers of blocks, then "last"."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        with torch.device("meta"):
            self.model = workload.model().to(workload.compute)
        found = blocks(self.model)
        self.container = found[0][0].rpartition(".")[0] if found else ""
        """The name of the module that has the blocks."""
        if any(name.rpartition(".")[0] != self.container for name, _ in found):
            places = ", ".join(sorted({name.rpartition(".")[0] for name, _ in found}))
            raise PlanError(
                f"the model has blocks in several places ({places}); only one row of them can be planned for"
            )
        self.names = [name.rpartition(".")[2] for name, _ in found]
        """Of the blocks, as the container has them."""
        seen: dict[Any, int] = {}
        self.kinds = [seen.setdefault(key, number) for number, key in enumerate(_signatures(found))]
        """For each block the number of the first block that is like it."""
        self._traced: dict[Any, Any] = {}

    @cached_property
    def parameters_in_all(self) -> int:
        """Elements of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def experts(self) -> int:
        """The number of experts of each mixture; 0 where there is none."""
        found = {next(experts.parameters()).shape[0] for _, _, experts in expert_layers(self.model)}
        return min(found, default=0)

    @cached_property
    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward of one sample: nothing twice, attention on both sides of the diagonal.

        So MFU is published (Chowdhery et al. 2022).
        """
        costs = self.costs(Cut(), 1, "none")
        links: list[str | int] = ["first", *self.kinds, "last"]
        works = [(costs[kind].forward, costs[kind].backward) for kind in links]
        return sum(there.products + back.products + 3 * there.uncut for there, back in works)

    def costs(self, cut: Cut, samples: int, recompute: Recompute) -> dict[str | int, Cost]:
        """What each link costs by kind ("first", "last", numbers in ``kinds``), for micro-batches of ``samples``.

        Raises PlanError for a cut that the model does not allow.
        """
        from arclight.parallel.planning.tracing import trace_blocks, trace_ends

        workload = self.workload
        cut.plan.check(sequence_length=workload.sequence)
        outside = replace(cut, cp=1, ep=1, context="gather")  # all that the first and the last part see is fewer tokens
        tokens = samples * workload.sequence // cut.cp
        high = min(workload.sequence, max(1, LINEAR // (2 * cut.tp)) * 2 * cut.tp)
        low = max(1, high // (2 * cut.tp)) * cut.tp
        few, many = self.once(("ends", outside), lambda: trace_ends(self, outside, low, high))
        at = (tokens - low) / (high - low) if high > low else 0.0
        ends = {name: few[name].line_to(many[name], at) for name in few}
        one = self.once(("blocks", cut, 1, recompute), lambda: trace_blocks(self, cut, 1, recompute))
        if samples == 1:
            return {**ends, **one}
        two = self.once(("blocks", cut, 2, recompute), lambda: trace_blocks(self, cut, 2, recompute))
        return {**ends, **{kind: one[kind].line_to(two[kind], samples - 1) for kind in one}}

    def parameters(self, cut: Cut) -> dict[str | int, Parameters]:
        """Shapes of each link's parameters, by kind."""
        found: dict[str | int, Parameters] = self.once(("parameters", cut), lambda: self._parameters(cut))
        return found

    def once(self, key: Any, trace: Callable[[], Any]) -> Any:
        """What ``trace`` gives for ``key``, asked for once; a PlanError is raised each time."""
        if key not in self._traced:
            try:
                self._traced[key] = trace()
            except PlanError as error:
                self._traced[key] = error
        if isinstance(self._traced[key], PlanError):
            raise self._traced[key]
        return self._traced[key]

    def _parameters(self, cut: Cut) -> dict[str | int, Parameters]:
        model, container = self.reduced(cut, Recorder())
        links: dict[str | int, list[nn.Parameter]] = {"first": [], "last": []}
        members = container.children() if container is not None else ()
        for kind, block in zip(dict.fromkeys(self.kinds), members, strict=True):
            links[kind] = list(block.parameters())
        taken = {parameter for parameters in links.values() for parameter in parameters}
        early = self._registered_before_blocks()
        for name, parameter in model.named_parameters():
            if parameter not in taken:
                links["first" if name in early else "last"].append(parameter)
        whole = set(replicated(model, cut))
        apart = {p for _, _, experts in expert_layers(model) for p in experts.parameters()} if cut.ep > 1 else set()

        def shapes(parameters: Iterable[nn.Parameter]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(parameter.shape) for parameter in parameters)

        return {
            kind: Parameters(
                shapes(p for p in parameters if p not in apart),
                shapes(p for p in parameters if p in whole),
                shapes(p for p in parameters if p in apart),
            )
            for kind, parameters in links.items()
        }

    def _registered_before_blocks(self) -> set[str]:
        """Names of the first part's parameters. Tied ones belong to the last part, where FSDP keeps them."""
        users: dict[nn.Parameter, int] = {}
        for _, parameter in self.model.named_parameters(remove_duplicate=False):
            users[parameter] = users.get(parameter, 0) + 1
        found: set[str] = set()
        for name, parameter in self.model.named_parameters():
            if self.container and name.startswith(f"{self.container}."):
                return found
            if users[parameter] == 1:
                found.add(name)
        return set()

    def reduced(self, cut: Cut, recorder: Recorder) -> tuple[nn.Module, nn.Module | None]:
        """A copy of the model with one block of each kind, as one process of ``cut`` has it; and its container of blocks."""
        memo: dict[int, Any] = {}
        if self.container:
            container = self.model.get_submodule(self.container)
            few = type(container)()
            for number, (name, child) in enumerate(container.named_children()):
                if number in self.kinds:
                    few.add_module(
                        str(len(few)) if isinstance(few, nn.ModuleList) else name, copy.deepcopy(child, memo)
                    )
            memo[id(container)] = few
        model: nn.Module = copy.deepcopy(self.model, memo)
        localize(model, cut, recorder, self.workload.device.kind == "cpu")
        return model, model.get_submodule(self.container) if self.container else None


def _signatures(found: list[tuple[str, nn.Module]]) -> list[Any]:
    """Equal for blocks that cost the same: classes, shapes and settings, but not what only tells a block's number."""
    keys = [name.rpartition(".")[2] for name, _ in found]
    settings = [
        {(name, key): value for name, module in block.named_modules() for key, value in vars(module).items()
         if isinstance(value, (int, float, str, bool, type(None))) and not key.startswith("_")}
        for _, block in found
    ]  # fmt: skip
    counting = {
        place for place in (settings[0] if len(found) > 1 else ())
        if all(own.get(place) in (key, number) and not isinstance(own[place], bool)
               for number, (key, own) in enumerate(zip(keys, settings, strict=True)))
    }  # fmt: skip
    return [
        (
            tuple((name, type(module)) for name, module in block.named_modules()),
            tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters()),
            tuple((place, value) for place, value in own.items() if place not in counting),
        )
        for (_, block), own in zip(found, settings, strict=True)
    ]
