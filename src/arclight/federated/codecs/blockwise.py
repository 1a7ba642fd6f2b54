"""Quantize tensors to 8 or 4 bits with a scale per block, and dequantize them.

Only `encoding` calls it. Parts and the arithmetic of decoding are wire format: server, nodes and other versions must decode the same bits.
"""

from __future__ import annotations

from functools import cache

import torch

from arclight.federated.codecs.error_feedback import LARGEST, SMALLEST, ErrorFeedback, cast_values, chunks_of
from arclight.federated.errors import BlobError

Parts = dict[str, torch.Tensor]

_NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen levels of QLoRA's NormalFloat (Dettmers et al. 2023, appendix E)."""
_STEPS = 32767
"""Steps from 0 to 1 in which a value is looked up among the levels."""


def encode_int8(feedback: ErrorFeedback) -> Parts:
    """Encode to int8: round(x / scale) with scale = largest / 127 of each block.

    The error is at most half a scale.
    """
    values = torch.empty(feedback.numel, dtype=torch.int8)
    scales = torch.empty(-(-feedback.numel // feedback.block))
    for where, chunk in feedback.chunks():
        scale = _settled(feedback.largest(chunk)) / 127.0
        scales[_rows(where, feedback.block)] = scale.view(-1)
        rounded = torch.mul(chunk, _inverse(scale), out=feedback.spare(chunk)).round_()
        values[where] = rounded.view(-1)[: where.stop - where.start]
        feedback.record(where, chunk, rounded.mul_(scale))
    return {"": values, "scale": scales}


def decode_int8(numel: int, dtype: torch.dtype, block: int, parts: Parts) -> torch.Tensor:
    values, scales = parts[""], parts["scale"]
    _check(values, torch.int8, numel)
    _check_scales(scales, -(-numel // block))
    out = torch.empty(numel, dtype=dtype)
    for where in chunks_of(numel, block):
        some = _filled(values[where].to(torch.float32), block)
        some *= scales[_rows(where, block)].unsqueeze(1)
        out[where] = cast_values(some.view(-1)[: where.stop - where.start], dtype)
    return out


def encode_int4(feedback: ErrorFeedback) -> Parts:
    """Encode to int4: the nearest level times the block's largest value.

    Two values are in a byte, the first in its lower half.
    """
    values = torch.empty((feedback.numel + 1) // 2, dtype=torch.uint8)
    scales = torch.empty(-(-feedback.numel // feedback.block))
    for where, chunk in feedback.chunks():
        scale = _settled(feedback.largest(chunk))
        scales[_rows(where, feedback.block)] = scale.view(-1)
        scaled = torch.mul(chunk, _inverse(scale), out=feedback.spare(chunk))
        place = scaled.mul_(_STEPS).round_().to(torch.int32).add_(_STEPS)
        codes = _nearest().index_select(0, place.view(-1)).view(-1, 2)
        packed = codes[:, 0] | (codes[:, 1] << 4)
        values[_bytes(where)] = packed[: (where.stop - where.start + 1) // 2]
        if feedback.residual is not None:
            feedback.record(where, chunk, _levels_of(packed).view(chunk.shape).mul_(scale))
    return {"": values, "scale": scales}


def decode_int4(numel: int, dtype: torch.dtype, block: int, parts: Parts) -> torch.Tensor:
    values, scales = parts[""], parts["scale"]
    _check(values, torch.uint8, (numel + 1) // 2)
    _check_scales(scales, -(-numel // block))
    out = torch.empty(numel, dtype=dtype)
    for where in chunks_of(numel, block):
        some = _filled(_levels_of(values[_bytes(where)]), block)
        some *= scales[_rows(where, block)].unsqueeze(1)
        out[where] = cast_values(some.view(-1)[: where.stop - where.start], dtype)
    return out


def _levels_of(packed: torch.Tensor) -> torch.Tensor:
    """Return the two levels of each byte, flat.

    A pair is fetched as one complex number, which is quicker than two fetches.
    """
    return _pairs().index_select(0, packed.to(torch.int32)).view(torch.float32).view(-1)


@cache
def _pairs() -> torch.Tensor:
    levels, codes = torch.tensor(_NORMAL_FLOAT), torch.arange(256)
    return torch.complex(levels[codes & 15], levels[codes >> 4])


@cache
def _nearest() -> torch.Tensor:
    """Return the nearest level's number for each of the places from -1 to 1."""
    levels = torch.tensor(_NORMAL_FLOAT, dtype=torch.float64)
    places = torch.arange(-_STEPS, _STEPS + 1, dtype=torch.float64) / _STEPS
    return torch.bucketize(places, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def _settled(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest >= SMALLEST, largest, 0.0)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, scale.reciprocal(), 0.0)


def _rows(where: slice, block: int) -> slice:
    return slice(where.start // block, -(-where.stop // block))


def _bytes(where: slice) -> slice:
    return slice(where.start // 2, (where.stop + 1) // 2)


def _filled(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return rows of ``block`` values, the last filled up with zeros or cut."""
    return torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)


def _check(part: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    if part.dtype != dtype or part.shape != (length,):
        raise BlobError(f"expected {length} values of {dtype}, got {tuple(part.shape)} of {part.dtype}")


def _check_scales(scales: torch.Tensor, blocks: int) -> None:
    _check(scales, torch.float32, blocks)
    if not bool(((scales >= 0) & (scales <= LARGEST)).all()):
        raise BlobError("a block's scale is negative, NaN or too large")
