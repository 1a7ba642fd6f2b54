"""Build one rank's shard of a model without other ranks, for fake tensors.

`chain` traces what `shard_shapes` leaves of a model; `estimates`, `mesh_search` and `fsdp_shards` pass a plan's degrees as `LayerSharding`.
What is sharded is read from the declarations that `parallelize` follows (``sharding`` of modules, ``context`` of attention, ``dispatcher``
of experts): a new style or exchange of ``parallel.layers`` needs its counterpart here. Collectives are replaced by operations with the same
shapes, forward and backward. Sequences lie in dimension 1 of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arclight.parallel.layers.context_parallel import kv_repeats
from arclight.parallel.layers.expert_parallel import expert_layers
from arclight.parallel.layers.tensor_parallel import declared_styles
from arclight.parallel.model.parallelize import check
from arclight.parallel.op_recorder import Collective, Dimension, OpRecorder, exchange, fused_attention
from arclight.parallel.plan import Plan, PlanError


@dataclass(frozen=True)
class LayerSharding:
    """Fields of a plan that decide the shapes of a layer on one rank."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    context: Literal["gather", "ulysses"] = "gather"

    @classmethod
    def of(cls, plan: Plan) -> LayerSharding:
        return cls(plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.loss_parallel, plan.context)

    @property
    def plan(self) -> Plan:
        """A plan with these fields, to check a model by."""
        return Plan(
            tp=self.tp, cp=self.cp, ep=self.ep, dp_shard=self.ep, sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel, context=self.context,
        )  # fmt: skip


class _Exchange(torch.autograd.Function):
    """Stand-in for a collective that leaves ``size`` elements in dimension ``dim``.

    In backward there is another collective ("" for none).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, size: int, there: Collective | Literal[""], back: Collective | Literal[""], dimension: Dimension
    ) -> Tensor:  # fmt: skip
        ctx.rest = (dim, x.shape[dim], back, dimension)
        return _exchanged(x, dim, size, there, dimension)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grad, *ctx.rest), None, None, None, None, None


def _exchanged(x: Tensor, dim: int, size: int, collective: Collective | Literal[""], dimension: Dimension) -> Tensor:
    """Exchange along ``dim`` as collectives do.

    They work along dimension 0, so that for another one all is copied before or after.
    """
    if not collective:
        return x.narrow(dim, 0, size)
    before = x.shape[dim]
    if size == before or dim == 0:
        same: Tensor = exchange(x, dim, size, collective, dimension)
        return same
    if size > before:
        parts = exchange(x, 0, x.shape[0] * (size // before), collective, dimension)
        return torch.cat(parts.chunk(size // before), dim)
    part: Tensor = exchange(torch.cat(x.chunk(before // size, dim)), 0, x.shape[0], collective, dimension)
    return part


def gather(x: Tensor, dim: int, parts: int, dimension: Dimension) -> Tensor:
    """Gather all parts of dimension ``dim``; the gradient, a sum over processes, is scattered."""
    out: Tensor = _Exchange.apply(x, dim, x.shape[dim] * parts, "all_gather", "reduce_scatter", dimension)
    return out


def scatter(x: Tensor, dim: int, parts: int, dimension: Dimension) -> Tensor:
    """Return the own part of a sum over processes; its gradient is gathered."""
    out: Tensor = _Exchange.apply(x, dim, x.shape[dim] // parts, "reduce_scatter", "all_gather", dimension)
    return out


def swap(x: Tensor, dimension: Dimension) -> Tensor:
    """Return as much as was given, of other processes; the same in backward."""
    out: Tensor = _Exchange.apply(x, 0, x.shape[0], "all_to_all", "all_to_all", dimension)
    return out


def shard_shapes(model: nn.Module, cut: LayerSharding, recorder: OpRecorder, cpu: bool) -> None:
    """Make ``model`` (on the meta device) the shard of one process of ``cut``, in place.

    ``recorder`` notes the share of all pairs of queries and keys that attention's masks leave. Raises PlanError, as
    `arclight.parallel.parallelize` does, for what does not divide.
    """
    check(model, cut.plan)
    layers = list(expert_layers(model))
    if cut.ep > 1 and not layers:
        raise PlanError(f"ep = {cut.ep} shares experts out, and the model has none: set ep = 1")
    for _, layer, experts in layers:
        _share_experts(layer, experts, cut)
    for module in model.modules():
        if hasattr(module, "context") and hasattr(module, "attend"):
            module.context = partial(_attend, recorder, cut, cpu)  # type: ignore[assignment]
    if cut.tp > 1:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for _, module, style in list(declared_styles(model)):
            _shrink(module, style, cut, made)


_DIMENSIONS = {"column": 0, "vocabulary": 0, "head": 0, "row": 1, "part": 1}
"""The dimension of parameters that a style cuts."""


def replicated(model: nn.Module, cut: LayerSharding) -> list[nn.Parameter]:
    """List parameters that ``tp`` replicates, whose gradients are summed over the group."""
    found: dict[nn.Parameter, None] = {}
    for _, module, style in declared_styles(model) if cut.tp > 1 else ():
        for part in module.modules() if style in ("sequence", "sequence_gather", "shared", "row", "part") else ():
            for name, parameter in part._parameters.items():
                partial_sum = (
                    (name == "bias") if style in ("row", "part") else style == "shared" or cut.sequence_parallel
                )
                if parameter is not None and partial_sum:
                    found[parameter] = None
    return list(found)


def _shrink(module: nn.Module, style: str, cut: LayerSharding, made: dict[nn.Parameter, nn.Parameter]) -> None:
    for part in module.modules() if style in _DIMENSIONS else ():
        for name, parameter in list(part._parameters.items()):
            if parameter is None or (style in ("row", "part") and name == "bias"):
                continue
            if parameter not in made:
                shape = list(parameter.shape)
                shape[_DIMENSIONS[style]] //= cut.tp
                own = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
                made |= {parameter: own, own: own}  # tied weights come by twice
            part._parameters[name] = made[parameter]
    if style in ("row", "vocabulary"):
        module.register_forward_hook(lambda _, __, out: _total(out, cut))
    elif style == "sequence_gather":
        module.register_forward_hook(lambda _, __, out: _whole(out, cut))
    elif style == "head" and not cut.loss_parallel:
        module.register_forward_hook(
            lambda _, __, out: _Exchange.apply(out, out.ndim - 1, out.shape[-1] * cut.tp, "all_gather", "", "tp")
        )
    elif style == "gather":
        module.register_forward_pre_hook(lambda _, args: (_whole(args[0], cut), *args[1:]))


def _whole(x: Tensor, cut: LayerSharding) -> Tensor:
    if cut.sequence_parallel:
        return gather(x, 1, cut.tp, "tp")
    out: Tensor = _Exchange.apply(x, 1, x.shape[1], "", "all_reduce", "tp")
    return out


def _total(x: Tensor, cut: LayerSharding) -> Tensor:
    if cut.sequence_parallel:
        return scatter(x, 1, cut.tp, "tp")
    out: Tensor = _Exchange.apply(x, 1, x.shape[1], "all_reduce", "", "tp")
    return out


def _share_experts(layer: nn.Module, experts: nn.Module, cut: LayerSharding) -> None:
    tensor_cuts: dict[str, int] = getattr(experts, "cuts", {})
    for name, parameter in list(experts._parameters.items()):
        if parameter is None:
            continue
        shape = list(parameter.shape)
        if shape[0] % cut.ep:
            raise PlanError(
                f"{shape[0]} experts cannot be cut into ep = {cut.ep} equal parts: use an ep that divides them"
            )
        shape[0] //= cut.ep
        if cut.tp > 1 and name in tensor_cuts:
            shape[tensor_cuts[name]] //= cut.tp
        experts._parameters[name] = nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
    if cut.ep > 1:
        layer.dispatcher = partial(_dispatch, cut.ep)  # type: ignore[assignment]


def _dispatch(ep: int, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Exchange rows with experts and back, taking loads to be equal."""
    counts = exchange(counts, 0, counts.shape[0], "all_to_all", "ep")
    came = swap(rows, "ep")
    order = torch.arange(len(came), device=rows.device)
    back = experts(came[order], counts[: counts.shape[0] // ep])
    return swap(back[order], "ep")


def _attend(
    recorder: OpRecorder, cut: LayerSharding, cpu: bool, query: Tensor, key: Tensor, value: Tensor, mask: Any, attend: Any
) -> Tensor:  # fmt: skip
    """Compute attention of local queries to all keys, as `ContextParallel` does.

    See `arclight.parallel.layers.context_parallel.ContextParallel`.
    """
    attending = partial(_masked, recorder, mask, cpu)
    if cut.cp == 1:
        return attending(query, key, value, 0)
    if cut.context == "ulysses":
        return _ulysses(query, key, value, cut.cp, attending)
    key, value = gather(torch.cat((key, value), -1), 2, cut.cp, "cp").split((key.shape[-1], value.shape[-1]), -1)
    first, last = query.chunk(2, 2)  # of process 0: the first and the last chunk
    length, keys = first.shape[2], key.shape[2]
    early = attending(first, key[:, :, :length], value[:, :, :length], 0)
    return torch.cat((early, attending(last, key, value, keys - length)), 2)


def _ulysses(query: Tensor, key: Tensor, value: Tensor, cp: int, attending: Callable[..., Tensor]) -> Tensor:
    repeats = kv_repeats(query.shape[1], key.shape[1], cp)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    parts = [x.unflatten(1, (cp, -1)).movedim(1, 0) for x in (query, key, value)]
    got = swap(torch.cat([part.flatten(1) for part in parts], 1), "cp").split([part[0].numel() for part in parts], 1)
    whole = [one.unflatten(1, part.shape[1:]).movedim(0, 2).flatten(2, 3) for one, part in zip(got, parts, strict=True)]
    out: Tensor = attending(*whole, 0).unflatten(2, (cp, -1)).movedim(2, 0)
    return swap(out.contiguous(), "cp").movedim(0, 1).flatten(1, 2)


def _masked(
    recorder: OpRecorder, mask: Any, cpu: bool, query: Tensor, key: Tensor, value: Tensor, first: int
) -> Tensor:
    """Compute attention of queries from ``first`` on.

    Keys that a window or chunk hides are taken to cost nothing.
    """
    queries, keys = query.shape[2], key.shape[2]
    window, chunk, causal = (getattr(mask, name, None) for name in ("window", "chunk", "causal"))
    seen = first + queries / 2 if causal else float(keys)
    seen = min(seen, window or keys, (chunk or 2 * keys) / 2)
    recorder.shares[queries, keys] = (seen / keys, bool(causal))
    return fused_attention(query, key, value, cpu)
