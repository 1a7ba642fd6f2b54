"""Shard a layer's declared ``experts`` over processes, and replace its ``dispatcher``.

`parallelize` calls `check_experts` and `place_experts`; `model.fsdp`, the planner, the pipeline's `engine` and `text.model.balance` ask
which layers have experts and which ranks have other tokens. Each process of the ``ep`` dimension keeps ``E / ep`` experts; rows travel to
the process that has their expert and back, by one exchange of counts, and one of rows in each direction. Over that, FSDP shards what is
left, on the mesh that completes ``ep`` to ``dp_shard * cp``, along the dimension that nothing else shards.

**Scale of gradients.** The package's convention: each process scales its loss so that the *average* over the data-parallel
processes (dp_replicate * dp_shard * cp) is the gradient of the whole. Rows of ``ep`` processes meet at one expert, so its
gradient arrives summed over them; here it is divided by ``ep`` on its way into the weight, after which an expert's gradient is
averaged over the remaining data-parallel processes (dp_replicate * dp_shard * cp / ep) like any other over all of them. FSDP's
own averaging on those meshes is therefore right as it is, and needs no divide factor; gloo needs
``set_force_sum_reduction_for_comms(True)``, since it cannot scale while it sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, broadcast, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from arclight.parallel.layers.permute_rows import inverse_permutation, take_rows
from arclight.parallel.mesh import Mesh
from arclight.parallel.plan import Plan, PlanError

Compute = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TokenGroups:
    """Groups of the ranks that run a layer of experts together; None for this rank alone.

    A module with a `TokenGroups` in its attribute ``groups`` gets the mesh's: see `place_experts`.
    """

    others: dist.ProcessGroup | None = None
    """Processes that read other tokens (data and context parallel)."""
    same: dist.ProcessGroup | None = None
    """Processes that compute the same for the same tokens (tensor parallel)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenGroups:
        """Return itself: a copied module runs beside the same processes.

        Groups of processes cannot be copied.
        """
        return self

    def mean(self, x: Tensor, weight: Tensor) -> Tensor:
        """Average ``x`` over processes with other tokens by a scalar ``weight``, without gradient."""
        if self.others is None:
            return x
        own = torch.cat(((x * weight).flatten(), weight.to(x.dtype).reshape(1)))
        summed: Tensor = wait_tensor(all_reduce(own, "sum", self.others))
        return (summed[:-1] / summed[-1].clamp(min=1)).view_as(x)

    def first(self, x: Tensor) -> Tensor:
        """Return the ``x`` of the first of the processes that compute the same."""
        if self.same is None:
            return x
        sent: Tensor = wait_tensor(broadcast(x, 0, self.same))
        return sent


class AllToAllDispatcher:
    """Sends each row to the process that has its expert and brings the result back.

    With ``capacity`` (rows from each process to each other one) all exchanges have fixed sizes, so that the host never waits
    for the device; rows beyond it skip their experts, and ``dropped`` is the share of the last pass, a tensor. It must be the
    same everywhere; 1.25 * tokens * top_k / ep leaves room for usual imbalance. Without it nothing is dropped, and the
    host reads the sizes once per pass.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int | None = None) -> None:
        self.group, self.capacity, self.size = group, capacity, dist.get_world_size(group)
        self.dropped: Tensor | None = None
        self.alone = False
        """Whether rows stay here, with the first of the experts: a pass for shapes only, which other processes do not run."""

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, experts: Compute) -> Tensor:
        if self.alone:
            counts_L = F.pad(counts_E.sum()[None], (0, len(counts_E) // self.size - 1))
            return experts(rows_RD, counts_L)
        counts_WL = counts_E.view(self.size, -1)
        if self.capacity is not None:
            return self._fixed(rows_RD, counts_WL, self.capacity, experts)
        received_WL = self._swap(counts_WL)
        send, receive = torch.stack((counts_WL.sum(1), received_WL.sum(1))).tolist()
        came = _Exchange.apply(rows_RD, send, receive, self.group)
        owner = torch.arange(counts_WL.shape[1], device=rows_RD.device).repeat(self.size)
        order = owner.repeat_interleave(received_WL.flatten(), output_size=len(came)).argsort(stable=True)
        back = self._compute(came, order, received_WL.sum(0), experts)
        out: Tensor = _Exchange.apply(back, receive, send, self.group)
        return out

    def _fixed(self, rows_RD: Tensor, counts_WL: Tensor, capacity: int, experts: Compute) -> Tensor:
        device, rows = rows_RD.device, len(rows_RD)
        ends_W = counts_WL.sum(1).cumsum(0)
        starts_W = ends_W - counts_WL.sum(1)
        kept_WL = counts_WL.cumsum(1).clamp(max=capacity).diff(dim=1, prepend=counts_WL.new_zeros(self.size, 1))
        received_WL = self._swap(kept_WL)
        slots_C = torch.arange(capacity, device=device)
        real_WC = slots_C < kept_WL.sum(1, keepdim=True)
        source = (starts_W[:, None] + slots_C).clamp(max=max(rows - 1, 0)).flatten()
        row_R = torch.arange(rows, device=device)
        peer_R = torch.searchsorted(ends_W, row_R, right=True)
        slot_R = row_R - starts_W[peer_R]
        kept_R, target_R = slot_R < capacity, peer_R * capacity + slot_R.clamp(max=capacity - 1)
        self.dropped = (~kept_R).sum() / max(rows, 1)
        real = real_WC.flatten()
        # also without rows: the backward of every process exchanges gradients
        block = take_rows(rows_RD, source, target_R, valid=real, back_valid=kept_R)
        even = [capacity] * self.size
        came = _Exchange.apply(block, even, even, self.group)
        owner = torch.searchsorted(received_WL.cumsum(1), slots_C.expand(self.size, -1).contiguous(), right=True)
        counts_L = received_WL.sum(0)
        # unused slots lie at the end and hold zeros: the last expert takes them, since kernels leave rows without an expert undefined
        filled_L = torch.cat((counts_L[:-1], (len(came) - counts_L[:-1].sum())[None]))
        back = self._compute(came, owner.flatten().argsort(stable=True), filled_L, experts)
        returned = _Exchange.apply(back, even, even, self.group)
        return take_rows(returned, target_R, source, valid=kept_R, back_valid=real)

    def _compute(self, came: Tensor, order: Tensor, counts_L: Tensor, experts: Compute) -> Tensor:
        undo = inverse_permutation(order)
        return take_rows(experts(take_rows(came, order, undo), counts_L), undo, order)

    def _swap(self, counts_WL: Tensor) -> Tensor:
        """Exchange counts: the rows every process has for the experts here, (W, L)."""
        received_WL = torch.empty_like(counts_WL)
        dist.all_to_all_single(received_WL, counts_WL.contiguous(), group=self.group)
        return received_WL


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    # the functional form is one that activation checkpointing keeps the result of and compilers see
    received: Tensor = wait_tensor(all_to_all_single(rows.contiguous(), receive, send, group))
    return received


class _OwnShard:
    """Local shard of a weight; its gradient is divided by the processes whose rows meet in it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, weight: Tensor) -> Tensor:
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        out: Tensor = _Divide.apply(own, self.size)
        return out


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


def expert_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield name, layer and stacked experts of each layer that declares ``experts``."""
    for name, module in model.named_modules():
        declared: Mapping[str, str] = getattr(module, "sharding", {})
        for child, kind in declared.items():
            if kind == "experts":
                yield name, module, module.get_submodule(child)


def check_experts(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError if ``plan`` does not fit the experts of ``model``, or it has none."""
    layers = list(expert_layers(model))
    if plan.ep > 1 and plan.pp == 1 and not layers:  # a stage may have none
        raise PlanError(f"ep = {plan.ep} shares experts out, and the model has none: set ep = 1")
    left = plan.dp_shard * plan.cp // plan.ep if plan.ep > 1 else 1
    for name, _, experts in layers:
        for weight, parameter in experts.named_parameters(recurse=False):
            cut, other = _dimensions(experts, weight)
            for dimension, size, axis, what in (
                (0, plan.ep, "ep", "experts"),
                (cut, plan.tp, "tp", "hidden features in each expert"),
                (other, left, "dp_shard * cp / ep", "features"),
            ):
                if parameter.shape[dimension] % size:
                    raise PlanError(
                        f"{name} has {parameter.shape[dimension]} {what}, which {axis} = {size} does not divide"
                    )


def _dimensions(experts: nn.Module, weight: str) -> tuple[int, int]:
    """Return the dimension of a stacked weight that ``tp`` shards, and the one for FSDP alone."""
    cuts: Mapping[str, int] = experts.cuts  # type: ignore[assignment]
    (other,) = {1, 2} - {cuts[weight]}
    return cuts[weight], other


def token_readers(model: nn.Module) -> list[Any]:
    """List the modules of ``model`` that read `TokenGroups`."""
    return [module for module in model.modules() if isinstance(getattr(module, "groups", None), TokenGroups)]


def place_experts(model: nn.Module, mesh: Mesh) -> None:
    """Shard the experts of ``model`` over ``ep`` and ``tp``; nothing if both are 1.

    Routers learn which processes read other tokens and which the same.
    """
    groups = TokenGroups(mesh.loss_group, mesh.tp.get_group() if mesh.plan.tp > 1 else None)
    for module in token_readers(model):
        module.groups = groups
    if not any(True for _ in expert_layers(model)):
        return  # a stage of a pipeline may have none
    if mesh.sparse is not None:
        over = mesh.sparse["ep", "tp"] if mesh.plan.tp > 1 else mesh.sparse["ep"]
        shard_experts(model, over, mesh.plan.expert_capacity or None)
    elif mesh.plan.tp > 1:
        shard_experts(model, mesh.tp)


def shard_experts(model: nn.Module, mesh: DeviceMesh, capacity: int | None = None) -> None:
    """Shard the experts of every mixture in ``model`` over ``mesh``, in place.

    Dimensions of the mesh are named ``ep``, ``tp`` or both. Stacked weights become DTensors: their experts are sharded
    over ``ep``, with the all-to-all exchange inserted, and each expert's hidden width over ``tp``, so that what a layer
    computes is a part of a sum over ``tp``, which the layer makes. Call it before `fully_shard`, with the same weights
    on all processes or on the meta device. capacity: see `AllToAllDispatcher`.
    """
    names = mesh.mesh_dim_names or ()
    for _, layer, experts in expert_layers(model):
        for weight, parameter in list(experts.named_parameters(recurse=False)):
            dimensions = {"ep": 0, "tp": _dimensions(experts, weight)[0]}
            placements = [Shard(dimensions[name]) for name in names]
            shard = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            setattr(experts, weight, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        sizes = dict(zip(names, mesh.shape, strict=True))
        experts.shard, experts.parts = _OwnShard(sizes.get("ep", 1)), sizes.get("tp", 1)  # type: ignore[assignment]
        if "ep" in sizes:
            layer.dispatcher = AllToAllDispatcher(mesh.get_group("ep"), capacity)  # type: ignore[assignment]


def fsdp_placement(model: nn.Module, mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """Return a ``shard_placement_fn`` for `fully_shard` that shards ``ep``'s experts.

    They are sharded over the remaining processes. Experts stay in the unit of their block (hooks within a block would
    differ between a checkpointed forward and its repetition), in a group of their own. They are cut along the dimension
    that neither ``ep`` nor ``tp`` cuts.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    assert mesh.sparse is not None
    if mesh.copies:
        left: FSDPMeshInfo = HSDPMeshInfo(mesh.sparse["dp_replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        left = FSDPMeshInfo(mesh.sparse["efsdp"], shard_mesh_dim=0)
    found = {}
    for _, _, experts in expert_layers(model):
        for weight, parameter in experts.named_parameters(recurse=False):
            found[parameter] = ShardPlacementResult(Shard(_dimensions(experts, weight)[1]), left)
    return found.get
