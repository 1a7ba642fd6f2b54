"""Round float32 to bfloat16 stochastically, with the same bits on every mesh.

`elementwise_rules` and `adopt` round with this, and take gradients in their parameters' layout from `aligned_gradients`; `muon` takes
`store` alone and rounds to the nearest. Random numbers depend on seed, name, step and element index only, and are part of exact resuming:
`draws` and `round_stochastically` must not change between versions.
"""

from __future__ import annotations

import zlib

import torch

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor

Owned = tuple[str, torch.Tensor, dict[str, torch.Tensor]]
"""Name, parameter and optimizer state."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def aligned_gradients(own: list[Owned]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients, with their parameters' strides and dtype."""
    return [
        _like(local_tensor(parameter), local_tensor(parameter.grad))
        for _, parameter, _ in own
        if parameter.grad is not None
    ]


def _like(part: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.stride() == part.stride() and gradient.dtype == part.dtype:
        return gradient
    return torch.empty_like(part).copy_(gradient)


def store(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Store ``value`` into ``target``, cast to its dtype, unless ``skip`` is true.

    ``skip``: a tensor on the device.
    """
    target.copy_(value if skip is None else torch.where(skip, target, value))


def draws(tensor: torch.Tensor) -> torch.Tensor:
    """Return a pseudo-random number below 2^32 (int64) for each element of this rank's shard.

    It is a hash of the element's index in the full tensor.
    """
    part = local_tensor(tensor)
    offsets: tuple[int, ...] = (0,) * part.ndim
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    place = torch.zeros((), dtype=torch.int64, device=part.device)
    stride = 1
    for dim in reversed(range(part.ndim)):
        along = torch.arange(offsets[dim], offsets[dim] + part.shape[dim], device=part.device) * stride
        place = place + along.view(-1, *[1] * (part.ndim - 1 - dim))
        stride *= tensor.shape[dim]
    return _hash(place).expand(part.shape)


def _hash(number: torch.Tensor) -> torch.Tensor:
    """Return the finalizer of MurmurHash3 (Appleby, public domain) on the lower 32 bits."""
    mask = 0xFFFFFFFF
    number = number & mask
    number = ((number ^ (number >> 16)) * 0x85EBCA6B) & mask
    number = ((number ^ (number >> 13)) * 0xC2B2AE35) & mask
    return number ^ (number >> 16)


def round_stochastically(
    value: torch.Tensor, draw: torch.Tensor, step: torch.Tensor, seed: int, name: str
) -> torch.Tensor:
    """Round ``value`` (float32) to bfloat16 up or down at random, keeping its mean.

    The direction depends only on ``seed``, ``name``, ``step`` (0-dim) and the element's number in ``draw`` (see :func:`draws`), so it is
    the same on every mesh.
    """
    key = _hash(step.to(torch.int64) + zlib.crc32(f"{seed}/{name}".encode()))
    noise = (_hash(draw + key) & 0xFFFF).to(torch.int32)
    # bfloat16 drops the lower half of a float32
    bits = (value.contiguous().view(torch.int32) + noise) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)
