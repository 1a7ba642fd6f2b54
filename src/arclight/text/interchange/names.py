"""The tensors of a model by their names, whatever wraps its modules."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arclight.text.interchange.keys import Bounds

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """The name without what compilation and recomputation put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and lasting buffers; a tied parameter under each of its names."""
    return {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def same_tensors(found: dict[str, Tensor]) -> list[list[str]]:
    """Names in groups of one tensor each, in the order of ``found``."""
    groups: dict[int, list[str]] = {}
    for name, tensor in found.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def own_part(tensor: Tensor) -> tuple[Tensor, Bounds]:
    """What this process holds of ``tensor``, and which part of the whole that is."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple((0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    bounds = tuple((start, start + length) for start, length in zip(offsets, lengths, strict=True))
    return tensor.to_local(), bounds
