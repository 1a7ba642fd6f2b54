"""Small unsigned integers side by side in bytes, lowest bits first."""

from __future__ import annotations

import torch

from arclight.federated.errors import BlobError

_AT_ONCE = 1 << 18
"""Values that are packed at a time, a multiple of every group; bounds the memory needed besides."""


def width_for(count: int) -> int:
    """Bits for the numbers 0 to ``count - 1``; beyond 8, even ones, which are quick to pack. ``count`` is at most 65536."""
    width = max(1, (count - 1).bit_length())
    return width if width <= 8 else width + width % 2


def packed_size(count: int, width: int) -> int:
    """Bytes of ``count`` integers."""
    return (count * width + 7) // 8


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Bytes (uint8, flat) of integers in [0, 2^width); width 1 to 8, or an even one up to 16."""
    group, length = _group(width)
    flat = values.reshape(-1)
    packed = torch.empty(-(-len(flat) // group) * length, dtype=torch.uint8)
    shifts = torch.arange(group) * width
    for start in range(0, len(flat), _AT_ONCE):
        some = flat[start : start + _AT_ONCE].to(torch.int64)
        some = torch.nn.functional.pad(some, (0, -len(some) % group)).view(-1, group)
        words = (some << shifts).sum(1)
        begin = start // group * length
        packed[begin : begin + len(words) * length] = words.view(torch.uint8).view(-1, 8)[:, :length].reshape(-1)
    return packed[: packed_size(len(flat), width)].clone()


def unpack(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Inverse of `pack`, int32. Raises BlobError where the bytes are not those of ``count`` integers."""
    if packed.dtype != torch.uint8 or packed.shape != (packed_size(count, width),):
        raise BlobError(
            f"{count} numbers of {width} bits are {packed_size(count, width)} bytes, "
            f"got {tuple(packed.shape)} of {packed.dtype}"
        )
    group, length = _group(width)
    values = torch.empty(count, dtype=torch.int32)
    shifts = torch.arange(group) * width
    for start in range(0, count, _AT_ONCE):
        stop = min(start + _AT_ONCE, count)
        begin, groups = start // group * length, -(-(stop - start) // group)
        some = packed[begin : begin + groups * length]
        some = torch.nn.functional.pad(some, (0, groups * length - len(some))).view(groups, length)
        words = torch.nn.functional.pad(some, (0, 8 - length)).view(-1).view(torch.int64)
        values[start:stop] = ((words.unsqueeze(1) >> shifts) & ((1 << width) - 1)).view(-1)[: stop - start]
    return values


def _group(width: int) -> tuple[int, int]:
    """Values that go into one 64-bit word, and the whole bytes that they take there."""
    group = 8 if width <= 8 else 4
    return group, group * width // 8
