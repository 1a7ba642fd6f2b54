"""Parallelize a model over a plan's mesh: float8, tp, ep, cp, checkpoints, compile, FSDP.

`parallelize` is public (``arclight.parallel``). `PlanStrategy` calls it when it sets a module up, and ``arclight plan --verify`` on the
meta device; the planner and ``arclight`` call `check` and `check_sizes` first. Torch requires the order of the steps; parameter names stay
the model's.
"""

from __future__ import annotations

import torch
from torch import nn

from arclight.parallel.deterministic_init import materialize
from arclight.parallel.layers.context_parallel import apply_context_parallel, kv_repeats
from arclight.parallel.layers.expert_parallel import check_experts, place_experts
from arclight.parallel.layers.tensor_parallel import apply_tensor_parallel, check_sharding_tables
from arclight.parallel.mesh import Mesh
from arclight.parallel.model.activation_checkpoint import checkpoint_blocks
from arclight.parallel.model.compile import compile_blocks, enable_async_tp
from arclight.parallel.model.float8 import convert_to_float8
from arclight.parallel.model.fsdp import FsdpTypes, check_tied, shard_parameters
from arclight.parallel.plan import Plan


def parallelize(
    model: nn.Module, plan: Plan | Mesh, *, device: torch.device | str = "cpu", types: FsdpTypes | None = None,
    seed: int | None = None, sequence_length: int | None = None, root: nn.Module | None = None,
) -> nn.Module:  # fmt: skip
    """Shard ``model`` over the processes of ``plan``; return what is to be called.

    All of the processes call this. The model is changed in place and comes back itself (or ``root``); if the plan
    only replicates, it comes back in a DistributedDataParallel (not if replicas are independent). On the meta device
    it takes memory only once it is sharded, and its first values are a function of ``seed`` (by default torch's) and
    names; otherwise its values must be equal on all processes. Losses are means over what a process sees: gradients are
    averaged over ``dp_replicate * dp_shard * cp`` processes, over ``dp_shard * cp`` if replicas are independent.

    device: this process's. types: see `FsdpTypes`. root: a module around the model that is called in its place and may use its parts.
    sequence_length: that of its input, to be checked. Raises PlanError, before anything is changed, if the plan does not fit.
    """
    device = torch.device(device)
    mesh = plan if isinstance(plan, Mesh) else Mesh(plan, device.type)
    plan = mesh.plan
    check(model, plan, sequence_length)
    if plan.async_tp:
        enable_async_tp(mesh)
    _move(model, device)
    convert_to_float8(model, plan, device)
    if plan.tp > 1:
        apply_tensor_parallel(model, mesh.tp, sequence=plan.sequence_parallel, logits=plan.loss_parallel)
    place_experts(model, mesh)
    if plan.cp > 1:
        apply_context_parallel(model, mesh.grid["cp"], plan.context)
    checkpoint_blocks(model, plan.activation_checkpointing)
    compile_blocks(model, plan)
    outermost = root if root is not None else model
    if not plan.only_replicates:
        shard_parameters(model, mesh, types, outermost)
    materialize(model, torch.device("cpu") if plan.cpu_offload else device, seed)
    _move(model, device, parameters=False)
    return replicate(outermost, plan)


def replicate(root: nn.Module, plan: Plan) -> nn.Module:
    """Wrap ``root`` in DistributedDataParallel if the plan only replicates, else return it.

    It averages what trains now.
    """
    trains = any(parameter.requires_grad for parameter in root.parameters())
    if plan.only_replicates and plan.world_size > 1 and not plan.independent_replicas and trains:
        return nn.parallel.DistributedDataParallel(root)
    return root


def _move(model: nn.Module, device: torch.device, parameters: bool = True) -> None:
    """Move tensors that have memory elsewhere to ``device``."""
    for tensor in (*(model.parameters() if parameters else ()), *model.buffers()):
        if not tensor.is_meta and not _is_on(tensor, device):
            tensor.data = tensor.data.to(device)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True where ``tensor`` lies on ``device``: on that very one, if it is named."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def check(model: nn.Module, plan: Plan, sequence_length: int | None = None, world_size: int | None = None) -> None:
    """Raise PlanError, with the fix, if ``plan`` does not fit ``model``, changing nothing.

    Besides the sharding tables these attributes of a ``config`` of the model (or of a part of it) are looked at, if they are
    there: heads, kv_heads, hidden, vocab_size, experts, layers, repeats.
    """
    check_sizes(model, plan, sequence_length, world_size)
    check_sharding_tables(model, plan)
    if not plan.only_replicates:
        check_tied(model)
    check_experts(model, plan)


def check_sizes(
    model: nn.Module, plan: Plan, sequence_length: int | None = None, world_size: int | None = None
) -> None:
    """Check sizes only, see :func:`check`, for models that cannot be sharded."""
    plan.check(world_size=world_size, sequence_length=sequence_length)
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None and not isinstance(config, nn.Module):
            found = {name: getattr(config, name, None) for name in FACTS}
            known = {name: value for name, value in found.items() if type(value) is int}
            plan.check(**known)
            if plan.cp > 1 and plan.context == "ulysses" and "heads" in known:
                kv_repeats(known["heads"] // plan.tp, known.get("kv_heads", known["heads"]) // plan.tp, plan.cp)


FACTS = ("heads", "kv_heads", "hidden", "vocab_size", "experts", "layers", "repeats")
