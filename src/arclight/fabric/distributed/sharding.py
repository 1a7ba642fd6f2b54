"""Gather, shard, clip and initialise DTensors, of which users see full tensors.

Strategies, `MixedOptimizer`, ``trainer.checkpoint.named_state``, DiLoCo, pipelines and ``deploy.quantizing`` call these, also with plain
tensors. Values that `materialize` draws must not depend on the mesh: a sharded run starts from the weights of a single process.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from arclight.fabric.batches import map_tensors
from arclight.fabric.distributed.dtensor import local_tensors
from arclight.fabric.distributed.shard_regions import local_regions
from arclight.fabric.seeding import seed_device


def gather_tree(tree: Any, keep: bool) -> Any:
    """Gather every sharded tensor of ``tree``; every rank must call this.

    Full tensors are on the CPU if ``keep``, else empty ones take their places. Beside those that are kept, one tensor at a time is full.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        full = full_tensor(tensor).detach()
        return full.cpu() if keep else full.new_empty(0)

    return map_tensors(tree, whole)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor of all shards of ``tensor``; every process must call this.

    One mesh dimension after the other, the first one (FSDP's, which shards within the others') first: torch
    does the same for `full_tensor`, with a warning on every process.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    whole: torch.Tensor = tensor.to_local()
    return whole


def gathered_copy(module: nn.Module) -> nn.Module:
    """Copy ``module`` with full parameters, outside of FSDP; every process must call this."""
    from torch.distributed.fsdp import FSDPModule

    parameters = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    memo: dict[int, Any] = {
        id(shard): nn.Parameter(full_tensor(shard).detach().clone(), shard.requires_grad) for shard in parameters
    }
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for unit in units:  # FSDP has put a class between, which refuses to be copied
        plain = next(kind for kind in type(unit).__mro__[1:] if not issubclass(kind, FSDPModule))
        memo[id(unit)] = object.__new__(plain)
    for unit in units:
        fields = {name: value for name, value in vars(unit).items() if not name.startswith(_OF_FSDP)}
        for name, hooks in fields.items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                fields[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_of_fsdp(hook))
        if "forward" in fields:  # on the instance, around the one of its class, whose module it would keep
            fields["forward"] = inspect.unwrap(fields["forward"])
        memo[id(unit)].__dict__.update(copy.deepcopy(fields, memo))
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied


_OF_FSDP = ("__composable_api", "_is_fsdp", "_fsdp_")
"""What names of FSDP's fields in a module begin with."""


def _is_of_fsdp(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed")


def shard_like(full: torch.Tensor, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return this process' shard of ``full``, sharded as ``like`` is. No communication.

    It is on ``device``, by default that of ``like``. Of a tensor that is still in a file only that shard is read. ``full`` itself is
    returned if ``like`` is not sharded, and if shapes differ, which the caller's ``load_state_dict`` then reports.
    """
    stored = hasattr(full, "read")
    if not isinstance(like, DTensor) or isinstance(full, DTensor) or full.shape != like.shape:
        return full.read() if stored else full  # type: ignore[attr-defined]
    local, target = like.to_local(), device or like.device
    regions = local_regions(like)
    whole_part = [region for region in regions if region.shape == tuple(local.shape)]
    if whole_part and not stored:
        part = whole_part[0].of_whole(full).detach().to(target, copy=True).contiguous()
        return from_local_tensor(part, like)
    part = torch.empty(local.shape, dtype=full.dtype, device=target)
    for region in regions:
        own = region.of_part(part)
        if not stored:
            own.copy_(region.of_whole(full).detach())
        elif own.is_cpu:
            full.read(region.offset, region.shape, into=own)  # type: ignore[attr-defined]
        else:
            own.copy_(full.read(region.offset, region.shape))  # type: ignore[attr-defined]
    return from_local_tensor(part, like)


def from_local_tensor(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the DTensor of which this process holds ``part``, sharded as ``like`` is."""
    made: torch.Tensor = DTensor.from_local(
        part.to(like.device) if not like.is_meta else part, like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    return made


def accept_full_weights(module: nn.Module) -> None:
    """Let ``module.load_state_dict`` take full tensors from now on."""

    def shard_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        prefix = prefix[:-1]
        parameters = module.named_parameters(prefix, remove_duplicate=False)  # state has tied ones under each name
        for name, tensor in itertools.chain(parameters, module.named_buffers(prefix, remove_duplicate=False)):
            if isinstance(state.get(name), torch.Tensor):
                state[name] = shard_like(state[name], tensor)

    module.register_load_state_dict_pre_hook(shard_state_dict)


def accept_full_optimizer_state(optimizer: Optimizer) -> None:
    """Let ``optimizer.load_state_dict`` take full tensors, also those still in a file."""
    if getattr(optimizer, "_accepts_full_state", False):
        return
    optimizer._accepts_full_state = True  # type: ignore[attr-defined]

    def shard_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = dict(zip(numbers, parameters_of(optimizer), strict=False))
        moments = {
            number: {
                name: shard_like(value, parameters[number]) if isinstance(value, torch.Tensor) else value
                for name, value in entries.items()
            }
            if number in parameters
            else entries
            for number, entries in state["state"].items()
        }
        return {**state, "state": moments}

    optimizer.register_load_state_dict_pre_hook(shard_state_dict)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def replace_parameters(optimizer: Optimizer, replaced: Mapping[Any, nn.Parameter]) -> None:
    """Point ``optimizer`` to the shards that replaced its parameters, and shard its state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if parameter in replaced]:
        new, entries = replaced[old], optimizer.state.pop(old)
        optimizer.state[new] = {
            name: shard_like(value, new) if isinstance(value, torch.Tensor) else value
            for name, value in entries.items()
        }


# -- gradients -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_norm(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, error: bool) -> torch.Tensor:
    """Clip gradients by their total norm over all meshes; return the norm before.

    It is equal on every process. Raises RuntimeError with ``error`` if the norm is NaN or infinite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = total_norm(gradients, norm_type)
    scale_to_norm(gradients, total, max_norm, error)
    return total


@torch.no_grad()
def total_norm(gradients: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients, over one or several meshes; 0 if there are none."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [full_tensor(nn.utils.get_total_norm(group, norm_type)) for group in meshes.values()]
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    return total


@torch.no_grad()
def scale_to_norm(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float, error: bool) -> None:
    """Scale gradients of norm ``total`` down to ``max_norm``.

    With ``error``, raises RuntimeError if the norm is NaN or infinite.
    """
    if error and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped; with error_if_nonfinite=False they are "
            "multiplied by what comes out"
        )
    if parts := local_tensors(gradients):
        scale_tensors(parts, torch.clamp(max_norm / (total + 1e-6), max=1.0))


@torch.no_grad()
def scale_tensors(parts: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply ``parts`` in place by ``factor``, which may lie on another device."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(parts[0].device)
    torch._foreach_mul_(parts, factor)


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Limit every element of the gradients."""
    parts = local_tensors([parameter.grad for parameter in parameters if parameter.grad is not None])
    if parts:
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)


# -- first values --------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Copy rank 0's values of ``module``'s unsharded tensors, by way of ``device``."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            value = tensor.to(device).contiguous()
            dist.broadcast(value, 0)
            tensor.copy_(value)


@torch.no_grad()
def materialize(
    module: nn.Module, device: torch.device, seed: Callable[[str], int] | None = None, local: bool = False
) -> None:
    """Allocate and initialise meta tensors by the modules' own ``reset_parameters``.

    With ``seed`` each module draws from generators seeded by its name, and the global ones stay as they are. ``local`` says that
    processes have different modules: each keeps what it drew, which the seed makes the same wherever it is drawn.

    The values do not depend on how tensors are sharded: each module's are drawn whole, as one process would, and its shard
    kept. (Drawing into shards would give every process the same numbers on some devices.) Warns of modules that have no
    ``reset_parameters``: their values are arbitrary until a checkpoint is loaded.
    """
    without, made = set(), dict[torch.Tensor, torch.Tensor]()
    names = {part: name for name, part in module.named_modules()}
    for part in _children_first(module):
        own = {name: tensor for name, tensor in _own_tensors(part) if tensor.is_meta}
        new = {name: tensor for name, tensor in own.items() if tensor not in made}  # else tied to another module's
        if new:
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if not callable(reset):
                without.add(type(part).__name__)
            with nullcontext() if seed is None else _seeded(seed(names[part]), device):
                _draw(part, own, reset if callable(reset) else None, device)
        for name, tensor in own.items():
            if name in new:
                made[tensor] = _kept(_tensor(part, name), tensor, device, local)
            _put(part, name, made[tensor])
    if without:
        warnings.warn(
            "these modules have no `reset_parameters()` method for re-initialization: "
            f"{', '.join(sorted(without))}. Their parameters hold arbitrary values until a checkpoint is loaded",
            stacklevel=3,
        )


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules as constructors run: a module comes after its children."""
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_device(seed, device)
        yield


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _draw(module: nn.Module, own: dict[str, torch.Tensor], reset: Any, device: torch.device) -> None:
    """Replace ``own`` by full tensors and initialise them; restore the module's other tensors."""
    others = [(tensor, tensor.detach().clone()) for name, tensor in _own_tensors(module) if name not in own]
    for name, tensor in own.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        _put(module, name, nn.Parameter(whole, tensor.requires_grad) if name in module._parameters else whole)
    if reset is not None:
        reset()
    for tensor, value in others:
        tensor.copy_(value)


def _kept(value: torch.Tensor, place: torch.Tensor, device: torch.device, local: bool) -> torch.Tensor:
    """Return the shard of the full ``value`` (rank 0's) that this rank keeps in ``place``."""
    whole = value.detach()
    if not local and dist.is_available() and dist.is_initialized():
        dist.broadcast(whole, 0)
    kept = shard_like(whole, place, device)
    return nn.Parameter(kept, place.requires_grad) if isinstance(value, nn.Parameter) else kept


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
    assert tensor is not None
    return tensor


def _put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in module._parameters:
        assert isinstance(tensor, nn.Parameter)
        module._parameters[name] = tensor
    else:
        module._buffers[name] = tensor
