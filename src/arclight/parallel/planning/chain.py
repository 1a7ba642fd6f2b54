"""Describe a model as a chain (embedding, blocks, head with loss), each with its cost.

`text.workload` makes a `Workload`, ``arclight plan`` a `Chain` of it; `mesh_search`, `estimates`, `fsdp_shards` and `pp_layout` ask that
for costs, parameters and kinds of links. Links are traced with fake tensors, one of each kind, when a plan first asks for them. What is
recomputed must follow `activation_checkpoint`, and what is sharded `parallelize`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from arclight.parallel.blocks import repeated_blocks
from arclight.parallel.hardware import TABLE, Hardware
from arclight.parallel.layers.expert_parallel import expert_layers
from arclight.parallel.layers.tensor_parallel import declared_styles
from arclight.parallel.op_recorder import (
    FusedAttentionMode,
    Message,
    OpRecorder,
    Work,
    exchange,
    mark_passes,
    size_of,
    summed,
    tensors_in,
)
from arclight.parallel.plan import PlanError
from arclight.parallel.planning.sharded_shapes import LayerSharding, replicated, shard_shapes

Recompute = Literal["none", "selective", "full"]
"""What blocks compute again in backward: see `Plan.activation_checkpointing`."""


@dataclass(frozen=True)
class Workload:
    """Training workload, as far as a planner must know it.

    model: builds it (called under the meta device). batch(samples, sequence): one micro-batch. loss(model, batch): its loss.
    samples: of one step, over all processes. sequence: tokens of a sample.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    samples: int
    sequence: int
    compute: torch.dtype = torch.bfloat16
    """Dtype of products and gathered weights; stored weights, gradients and moments are float32."""
    compiled: bool = True
    """Whether blocks are compiled: then what is no matrix product is fused, and computed again if that is cheaper than keeping it."""
    moments: int = 2
    """Tensors that the optimizer keeps of each parameter (2 for Adam)."""
    device: Hardware = TABLE["h100"]


@dataclass(frozen=True)
class Cost:
    """Cost of one link for one micro-batch on one process; sizes in bytes."""

    saved_activation_bytes: int
    """Bytes that forward keeps for backward, its output included."""
    forward_peak: int
    """Most bytes in forward, above what was there before."""
    backward_peak: int
    """Most bytes in backward, above what was there before forward; gradients of the whole link included."""
    forward: Work
    backward: Work
    output: int
    """Bytes of its output, which the next link gets."""

    def line_to(self, other: Cost, at: float) -> Cost:
        """Interpolate between this (0) and ``other`` (1) at ``at``."""
        names = ("saved_activation_bytes", "forward_peak", "backward_peak", "output")
        sizes = {name: round(getattr(self, name) + at * (getattr(other, name) - getattr(self, name))) for name in names}
        forward, backward = self.forward.line_to(other.forward, at), self.backward.line_to(other.backward, at)
        return Cost(forward=forward, backward=backward, **sizes)


@dataclass(frozen=True)
class Parameters:
    """Shapes of a link's parameters on one tensor-parallel rank, before FSDP shards them."""

    shapes: tuple[tuple[int, ...], ...]
    replicated: tuple[tuple[int, ...], ...]
    """Shapes of those parameters that ``tp`` replicates, whose gradients are summed over it."""
    experts: tuple[tuple[int, ...], ...] = ()
    """Shapes of experts' parameters, which ``ep`` distributes and FSDP shards over fewer processes."""

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in (*self.shapes, *self.experts))


LINEAR = 2048
"""Tokens at which the first and the last part are traced, and at half of which: their costs are linear in tokens.

With few tokens they are not: beside the logits of a short sequence the float32 gradient of the head decides the peak.
"""


class Chain:
    """The links of a workload's model: "first", then numbers of blocks, then "last"."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        with torch.device("meta"):
            self.model = workload.model().to(workload.compute)
        if (repeats := getattr(getattr(self.model, "config", None), "repeats", 1)) > 1:
            raise PlanError(
                f"costs are not known of blocks that run {repeats} times with the same weights: set the plan's dimensions yourself"
            )
        found = repeated_blocks(self.model)
        self.container = found[0][0].rpartition(".")[0] if found else ""
        """The name of the module that has the blocks."""
        if any(name.rpartition(".")[0] != self.container for name, _ in found):
            places = ", ".join(sorted({name.rpartition(".")[0] for name, _ in found}))
            raise PlanError(
                f"the model has blocks in several places ({places}); only one row of them can be planned for"
            )
        self.names = [name.rpartition(".")[2] for name, _ in found]
        """Names of the blocks in their container."""
        seen: dict[Any, int] = {}
        self.kinds = [seen.setdefault(key, number) for number, key in enumerate(_signatures(found))]
        """Number of the first equal block, for each block."""
        self._traced: dict[Any, Any] = {}

    @cached_property
    def parameters_in_all(self) -> int:
        """Elements of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def experts(self) -> int:
        """The number of experts of each mixture; 0 if there is none."""
        found = {next(experts.parameters()).shape[0] for _, _, experts in expert_layers(self.model)}
        return min(found, default=0)

    @cached_property
    def flops_per_sample(self) -> float:
        """Floating-point operations of forward and backward of one sample.

        Nothing counts twice, and attention counts on both sides of the diagonal. So MFU is published (Chowdhery et al.
        2022).
        """
        costs = self.costs(LayerSharding(), 1, "none")
        links: list[str | int] = ["first", *self.kinds, "last"]
        works = [(costs[kind].forward, costs[kind].backward) for kind in links]
        return sum(there.products + back.products + 3 * there.uncut for there, back in works)

    def costs(self, cut: LayerSharding, samples: int, recompute: Recompute) -> dict[str | int, Cost]:
        """Return the cost of each link by kind, for micro-batches of ``samples``.

        Kinds are "first", "last", and the numbers in ``kinds``. Raises PlanError for a cut that the model does not
        allow.
        """

        workload = self.workload
        cut.plan.check(sequence_length=workload.sequence)
        outside = replace(cut, cp=1, ep=1, context="gather")  # all that the first and the last part see is fewer tokens
        tokens = samples * workload.sequence // cut.cp
        high = min(workload.sequence, max(1, LINEAR // (2 * cut.tp)) * 2 * cut.tp)
        rows = LINEAR // high
        if rows > 1:  # of short sequences several
            batches = ((rows // 2, high), (rows, high))
        else:
            batches = ((1, max(1, high // (2 * cut.tp)) * cut.tp), (1, high))
        few, many = self.once(("ends", outside), lambda: trace_ends(self, outside, *batches))
        low, high = (count * length for count, length in batches)
        at = (tokens - low) / (high - low) if high > low else 0.0
        ends = {name: few[name].line_to(many[name], at) for name in few}
        one = self.once(("blocks", cut, 1, recompute), lambda: trace_blocks(self, cut, 1, recompute))
        if samples == 1:
            return {**ends, **one}
        two = self.once(("blocks", cut, 2, recompute), lambda: trace_blocks(self, cut, 2, recompute))
        return {**ends, **{kind: one[kind].line_to(two[kind], samples - 1) for kind in one}}

    def parameters(self, cut: LayerSharding) -> dict[str | int, Parameters]:
        """Return the shapes of each link's parameters, by kind."""
        found: dict[str | int, Parameters] = self.once(("parameters", cut), lambda: self._parameters(cut))
        return found

    def once(self, key: Any, trace: Callable[[], Any]) -> Any:
        """Return the result of ``trace`` for ``key``, cached.

        A PlanError is raised each time.
        """
        if key not in self._traced:
            try:
                self._traced[key] = trace()
            except PlanError as error:
                self._traced[key] = error
        if isinstance(self._traced[key], PlanError):
            raise self._traced[key]
        return self._traced[key]

    def _parameters(self, cut: LayerSharding) -> dict[str | int, Parameters]:
        model, container = self.reduced(cut, OpRecorder())
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
        of_experts = (
            {p for _, _, experts in expert_layers(model) for p in experts.parameters()} if cut.ep > 1 else set()
        )

        def shapes(parameters: Iterable[nn.Parameter]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(parameter.shape) for parameter in parameters)

        return {
            kind: Parameters(
                shapes(p for p in parameters if p not in of_experts),
                shapes(p for p in parameters if p in whole),
                shapes(p for p in parameters if p in of_experts),
            )
            for kind, parameters in links.items()
        }

    def _registered_before_blocks(self) -> set[str]:
        """Return the names of the first part's parameters.

        Tied ones belong to the last part, where FSDP keeps them.
        """
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

    def reduced(self, cut: LayerSharding, recorder: OpRecorder) -> tuple[nn.Module, nn.Module | None]:
        """Return a copy of the model, sharded by ``cut``, with one block of each kind.

        Its container of blocks is returned, too.
        """
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
        shard_shapes(model, cut, recorder, self.workload.device.kind == "cpu")
        return model, model.get_submodule(self.container) if self.container else None


def _signatures(found: list[tuple[str, nn.Module]]) -> list[Any]:
    """Return keys that are equal for blocks of equal cost: classes, shapes and settings.

    Settings that only number the blocks are left out.
    """
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


State = tuple[int, int, Work]
"""Live bytes, and most of them and the work since the last state."""


class _StoppedError(Exception):
    """Raised if nothing but what blocks are given was asked for."""


class _FirstBlockStop(nn.Module):
    """Stand-in for the first block that keeps its inputs and marks the end of the first part."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: Callable[[str], None] = lambda where: None
        self.ends = False
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.given = ((x.detach(), *args), kwargs)
        if self.ends:
            raise _StoppedError
        return mark_passes(x, self.passed)


class _PassThrough(nn.Module):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class _Tracing:
    """A share of the model made of fake tensors, and what must be on while it runs."""

    def __init__(self, chain: Chain, cut: LayerSharding, fused: bool) -> None:
        self.workload = chain.workload
        self.recorder = OpRecorder(self.workload.device.seconds, fused)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.model, container = chain.reduced(cut, self.recorder)
        with self.fake:
            self.model.to_empty(device="cpu")
        self.blocks = list(container.children()) if container is not None else []
        heads = any(style == "head" for _, _, style in declared_styles(self.model))
        self.parts_of_vocabulary = cut.tp if heads and cut.loss_parallel else 1
        self.stop = _FirstBlockStop()
        if container is not None:
            for number, name in enumerate(list(container._modules)):
                container._modules[name] = _PassThrough() if number else self.stop

    def running(self) -> ExitStack:
        modes = ExitStack()
        for mode in (self.fake, FusedAttentionMode(self.recorder, self.workload.device.kind == "cpu"), self.recorder):
            modes.enter_context(mode)
        self.recorder.begin()
        return modes

    def state(self) -> State:
        found = (self.recorder.live, self.recorder.peak, self.recorder.work())
        self.recorder.begin()
        return found

    def batch(self, samples: int, sequence: int) -> Any:
        with self.fake:
            return self.workload.batch(samples, sequence)


def trace_ends(
    chain: Chain, cut: LayerSharding, few: tuple[int, int], many: tuple[int, int]
) -> tuple[dict[str | int, Cost], dict[str | int, Cost]]:
    """Trace the costs of the first part, and of the last one with the loss.

    It is done for batches of ``few`` and of ``many`` (samples, tokens of each).
    """
    traced = _Tracing(chain, cut, fused=False)
    return _pass_through(traced, *few), _pass_through(traced, *many)


def _pass_through(traced: _Tracing, samples: int, sequence: int) -> dict[str | int, Cost]:
    batch = traced.batch(samples, sequence)
    traced.model.zero_grad()
    base = traced.recorder.live
    marks: dict[str, State] = {}

    def state() -> State:
        live, peak, work = traced.state()
        return live - base, peak - base, work

    def passed(where: str) -> None:
        marks[where] = state()

    traced.stop.passed = passed
    with traced.running():
        loss = traced.workload.loss(traced.model, batch)
        marks["end"] = state()
        loss.backward()
        marks["back"] = state()
        del loss
    if traced.parts_of_vocabulary > 1:
        # A loss over a vocabulary in parts (`arclight.text.loss`) sums three float32 numbers of each token over `tp`, in two exchanges.
        live, peak, work = marks["end"]
        exchanged = (Message("all_reduce", "tp", 12.0 * samples * sequence, 2.0),)
        marks["end"] = (live, peak, work._replace(messages=summed((*work.messages, *exchanged))))
    boundary = sum(size_of(x) for x in tensors_in(traced.stop.given[0][:1]))
    traced.stop.given = ((), {})
    return _ends(marks, boundary)


def _ends(marks: dict[str, State], boundary: int) -> dict[str | int, Cost]:
    """Return the costs of the first and last part, from the marks of one pass through both.

    A mark is (live, peak, work).
    """
    end, back = marks["end"], marks["back"]
    if "forward" not in marks:
        whole = Cost(end[0], end[1], back[1], end[2], back[2], 0)
        return {"first": Cost(0, 0, 0, Work(), Work(), 0), "last": whole}
    between, turned = marks["forward"], marks["backward"]
    held = between[0]
    return {
        # What the last part leaves when backward comes by the mark: its weights' gradients, which are not the first part's.
        "first": Cost(held, between[1], back[1] - turned[0] + held + boundary, between[2], back[2], boundary),
        "last": Cost(end[0] - held, end[1] - held, turned[1] - held, end[2], turned[2], 0),
    }


def trace_blocks(chain: Chain, cut: LayerSharding, samples: int, recompute: Recompute) -> dict[str | int, Cost]:
    """Return the costs of a block of each kind."""
    traced = _Tracing(chain, cut, fused=chain.workload.compiled)
    batch = traced.batch(samples, chain.workload.sequence // cut.cp)
    traced.stop.ends = True
    with contextlib.suppress(_StoppedError), traced.running():
        traced.workload.loss(traced.model, batch)
    return {
        kind: _trace_block(traced, block, recompute)
        for kind, block in zip(dict.fromkeys(chain.kinds), traced.blocks, strict=True)
    }


def _trace_block(traced: _Tracing, block: nn.Module, recompute: Recompute) -> Cost:
    (x, *rest), kwargs = traced.stop.given
    x = x.detach().requires_grad_()
    start = traced.recorder.live
    with traced.running():
        out = recomputed(block, recompute, traced.workload.compiled)(x, *rest, **kwargs)
        live, peak, forward = traced.state()
        gradient = torch.empty_like(out)
        out.backward(gradient)
        _, most, backward = traced.state()
        cost = Cost(live - start, peak - start, most - start, forward, backward, size_of(out))
        del out, gradient
    block.zero_grad()
    return cost


def recomputed(block: nn.Module, recompute: Recompute, compiled: bool) -> Callable[..., Tensor]:
    """Return the block's forward with its recomputation, keeping what training would keep.

    A compiler keeps what is dear (products, attention, what was received) and computes the rest again, as it fuses it into
    backward's own operations: "none" when compiled. "selective" computes every second matrix product again too.
    """
    if recompute == "none" and not compiled:
        return block
    options: dict[str, Any] = {}
    if recompute != "full":
        options["context_fn"] = partial(_keeping, 2 if recompute == "selective" else 1)
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, **options)


def _keeping(every: int) -> Any:
    """Return the contexts of a checkpoint that keeps every ``every``-th matrix product.

    The first is kept, and so are attention and exchanges.
    """
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = func._overloadpacket.__name__
        keep = func is exchange or "attention" in name or name == "topk"
        if name in ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm", "conditional_product"):
            keep = counts[context.is_recompute] % every == 0
            counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
