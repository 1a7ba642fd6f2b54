"""Encode the largest values of each block: packed indices, signs and few magnitudes.

Keeping the largest and replacing magnitudes by the means of their groups never adds energy, so with error feedback the sum of
what is sent follows the sum of what was to be sent (Stich et al. 2018, Karimireddy et al. 2019).

`encoding` calls it for the codec ``topk``. The bytes are part of the protocol: they must stay.
"""

from __future__ import annotations

import torch

from arclight.federated.codecs.error_feedback import LARGEST, ErrorFeedback, cast_values, check_finite, chunks_of
from arclight.federated.errors import BlobError

Parts = dict[str, torch.Tensor]


def encode_topk(feedback: ErrorFeedback, keep: int, bits: int) -> Parts:
    """Encode ``keep`` values of a whole block; of a last, shorter one as large a share."""
    indices, codes, levels = [], [], []
    for where, chunk in feedback.chunks():
        left = feedback.record_zeros(where, chunk)
        for rows, width, some in _evenly(where.stop - where.start, feedback.block, keep):
            values = chunk[rows, :width]
            index = _largest(feedback, values, some)
            chosen = values.gather(1, index)
            code, means = _grouped(chosen.abs(), bits - 1)
            code += torch.signbit(chosen).to(torch.int64) << (bits - 1)
            indices.append(index.to(torch.int32).view(-1))
            codes.append(code.to(torch.uint8).view(-1))
            levels.append(means.view(-1))
            if left is not None:
                seen = cast_values(_signed(means).gather(1, code), feedback.dtype).to(torch.float32)
                begin = rows.start * feedback.block
                left[begin : begin + values.numel()].view(values.shape).scatter_(1, index, chosen - seen)
    return {
        "index": pack_bits(torch.cat(indices), bit_width(feedback.block)),
        "value": pack_bits(torch.cat(codes), bits),
        "level": torch.cat(levels),
    }


def decode_topk(numel: int, dtype: torch.dtype, block: int, keep: int, bits: int, parts: Parts) -> torch.Tensor:
    rows, rest = divmod(numel, block)
    count = rows * keep + _share(rest, block, keep)
    level = parts["level"]
    expected = (rows + bool(rest)) << (bits - 1)
    if level.dtype != torch.float32 or level.shape != (expected,):
        raise BlobError(f"expected {expected} magnitudes, got {tuple(level.shape)} of {level.dtype}")
    if not bool(((level >= 0) & (level <= LARGEST)).all()):
        raise BlobError("a magnitude is negative, NaN or too large")
    index = unpack_bits(parts["index"], bit_width(block), count)
    code = unpack_bits(parts["value"], bits, count)
    out = torch.empty(numel, dtype=dtype)
    first, row = 0, 0
    for where in chunks_of(numel, block):
        decoded = torch.zeros(-(-(where.stop - where.start) // block), block)
        for part, width, some in _evenly(where.stop - where.start, block, keep):
            lines = part.stop - part.start
            there = index[first : first + lines * some].view(lines, some).to(torch.int64)
            if not bool((there[:, -1] < width).all()) or not bool((there[:, 1:] > there[:, :-1]).all()):
                raise BlobError(f"indices in a block of {width} must rise and be below {width}")
            means = level[row << (bits - 1) : (row + lines) << (bits - 1)].view(lines, -1)
            what = code[first : first + lines * some].view(lines, some).to(torch.int64)
            decoded[part, :width].scatter_(1, there, _signed(means).gather(1, what))
            first, row = first + lines * some, row + lines
        out[where] = cast_values(decoded.view(-1)[: where.stop - where.start], dtype)
    return out


def _evenly(count: int, block: int, keep: int) -> list[tuple[slice, int, int]]:
    """Return rows of equal length among ``count`` values: rows, length, and values kept of each."""
    rows, rest = divmod(count, block)
    found = [(slice(0, rows), block, keep)] if rows else []
    return [*found, (slice(rows, rows + 1), rest, _share(rest, block, keep))] if rest else found


def _share(rest: int, block: int, keep: int) -> int:
    """Count the values kept of a block with only ``rest``: as large a share, rounded up."""
    return -(-keep * rest // block)


def _largest(feedback: ErrorFeedback, values: torch.Tensor, keep: int) -> torch.Tensor:
    """Return the rising indices of the ``keep`` largest magnitudes of each row.

    The keep largest lie in the keep groups with the largest maxima; finding those first leaves far less to sort. Magnitudes are
    compared as the integers that their bits are, which have the same order.
    """
    magnitudes = torch.abs(values, out=feedback.spare(values))
    rows, width = magnitudes.shape
    check_finite(feedback.key, magnitudes.amax(1))
    order = magnitudes.view(torch.int32)
    groups = width // 8
    if width % 8 or groups <= keep:
        index = order.topk(keep, dim=1, sorted=False).indices
    else:
        leading = order.view(rows, 8, groups).amax(1).topk(keep, dim=1, sorted=False).indices
        places = (leading.unsqueeze(1) + torch.arange(0, width, groups).view(1, 8, 1)).view(rows, -1)
        index = places.gather(1, order.gather(1, places).topk(keep, dim=1, sorted=False).indices)
    return index.to(torch.int32).sort(1).values.to(torch.int64)


def _grouped(magnitudes: torch.Tensor, halvings: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each row's magnitudes at their mean, and the halves again.

    Return groups and their means.
    """
    group = torch.zeros(magnitudes.shape, dtype=torch.int64)
    means = _means(magnitudes, group, 1)
    for done in range(halvings):
        group = 2 * group + (magnitudes > means.gather(1, group))
        means = _means(magnitudes, group, 2 << done)
    return group, means


def _means(magnitudes: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    sums = torch.zeros(len(magnitudes), groups, dtype=torch.float64)
    sums.scatter_add_(1, group, magnitudes.double())
    counts = torch.zeros_like(sums).scatter_add_(1, group, torch.ones_like(magnitudes, dtype=torch.float64))
    return (sums / counts.clamp_(min=1)).to(torch.float32)


def _signed(means: torch.Tensor) -> torch.Tensor:
    """Return the values of the codes: the magnitudes, then their negatives."""
    return torch.cat([means, -means], dim=1)


_AT_ONCE = 1 << 18
"""Values that are packed at a time, a multiple of every group; bounds the memory needed besides."""


def bit_width(count: int) -> int:
    """Return the bits for the numbers 0 to ``count - 1``.

    Beyond 8, even ones, which are quick to pack. ``count`` is at most 65536.
    """
    width = max(1, (count - 1).bit_length())
    return width if width <= 8 else width + width % 2


def packed_bytes(count: int, width: int) -> int:
    """Return the bytes of ``count`` packed integers."""
    return (count * width + 7) // 8


def pack_bits(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack integers in [0, 2^width) into bytes (uint8, flat), lowest bits first.

    width: 1 to 8, or an even one up to 16.
    """
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
    return packed[: packed_bytes(len(flat), width)].clone()


def unpack_bits(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Invert `pack_bits`, int32.

    Raises BlobError if the bytes are not those of ``count`` integers.
    """
    if packed.dtype != torch.uint8 or packed.shape != (packed_bytes(count, width),):
        raise BlobError(
            f"{count} numbers of {width} bits are {packed_bytes(count, width)} bytes, "
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
    """Return the values that go into one 64-bit word, and the whole bytes that they take there."""
    group = 8 if width <= 8 else 4
    return group, group * width // 8
