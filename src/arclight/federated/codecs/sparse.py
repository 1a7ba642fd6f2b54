"""The largest values of each block: packed places, and a sign and a magnitude out of few for each.

Keeping the largest and replacing magnitudes by the means of their groups never adds energy, so with error feedback the sum of
what is sent follows the sum of what was to be sent (Stich et al. 2018, Karimireddy et al. 2019).
"""

from __future__ import annotations

import torch

from arclight.federated.codecs import bits as packing
from arclight.federated.codecs.target import LARGEST, Target, check_finite, chunks_of, narrowed
from arclight.federated.errors import BlobError

Parts = dict[str, torch.Tensor]


def encode_topk(target: Target, keep: int, bits: int) -> Parts:
    """``keep`` values of a whole block; of a last, shorter one as large a share."""
    indices, codes, levels = [], [], []
    for where, chunk in target.chunks():
        left = target.said_few(where, chunk)
        for rows, width, some in _evenly(where.stop - where.start, target.block, keep):
            values = chunk[rows, :width]
            index = _largest(target, values, some)
            chosen = values.gather(1, index)
            code, means = _grouped(chosen.abs(), bits - 1)
            code += torch.signbit(chosen).to(torch.int64) << (bits - 1)
            indices.append(index.to(torch.int32).view(-1))
            codes.append(code.to(torch.uint8).view(-1))
            levels.append(means.view(-1))
            if left is not None:
                seen = narrowed(_signed(means).gather(1, code), target.dtype).to(torch.float32)
                begin = rows.start * target.block
                left[begin : begin + values.numel()].view(values.shape).scatter_(1, index, chosen - seen)
    return {
        "index": packing.pack(torch.cat(indices), packing.width_for(target.block)),
        "value": packing.pack(torch.cat(codes), bits),
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
        raise BlobError("a magnitude is no number that one can be")
    index = packing.unpack(parts["index"], packing.width_for(block), count)
    code = packing.unpack(parts["value"], bits, count)
    out = torch.empty(numel, dtype=dtype)
    first, row = 0, 0
    for where in chunks_of(numel, block):
        decoded = torch.zeros(-(-(where.stop - where.start) // block), block)
        for part, width, some in _evenly(where.stop - where.start, block, keep):
            lines = part.stop - part.start
            there = index[first : first + lines * some].view(lines, some).to(torch.int64)
            if not bool((there[:, -1] < width).all()) or not bool((there[:, 1:] > there[:, :-1]).all()):
                raise BlobError(f"places in a block of {width} must rise and lie within it")
            means = level[row << (bits - 1) : (row + lines) << (bits - 1)].view(lines, -1)
            what = code[first : first + lines * some].view(lines, some).to(torch.int64)
            decoded[part, :width].scatter_(1, there, _signed(means).gather(1, what))
            first, row = first + lines * some, row + lines
        out[where] = narrowed(decoded.view(-1)[: where.stop - where.start], dtype)
    return out


def _evenly(count: int, block: int, keep: int) -> list[tuple[slice, int, int]]:
    """Rows of equal length among ``count`` values: which, how long, and how many values of each are kept."""
    rows, rest = divmod(count, block)
    found = [(slice(0, rows), block, keep)] if rows else []
    return [*found, (slice(rows, rows + 1), rest, _share(rest, block, keep))] if rest else found


def _share(rest: int, block: int, keep: int) -> int:
    """Values kept of a block with only ``rest``: as large a share, rounded up."""
    return -(-keep * rest // block)


def _largest(target: Target, values: torch.Tensor, keep: int) -> torch.Tensor:
    """Rising places of the ``keep`` largest magnitudes of each row.

    The keep largest lie in the keep groups with the largest maxima; finding those first leaves far less to sort. Magnitudes are
    compared as the integers that their bits are, which have the same order.
    """
    magnitudes = torch.abs(values, out=target.spare(values))
    rows, width = magnitudes.shape
    check_finite(target.key, magnitudes.amax(1))
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
    """Each row's magnitudes halved at their mean, and the halves again: their group's number, and the groups' means."""
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
    """What each code stands for: the magnitudes, then their negatives."""
    return torch.cat([means, -means], dim=1)
