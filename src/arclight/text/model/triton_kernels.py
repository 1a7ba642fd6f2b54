"""Define the Triton kernels of the conditional product.

Only `conditional_product` imports it, at its first product. Tiles and layouts may change; results must agree with the grouped product, up to
rounding. With ``TRITON_INTERPRET=1`` in the environment before the import, kernels run in Triton's interpreter, on a CPU.

Rows come in the order of their experts. A program computes one tile of the result: it finds its expert by counting the experts
whose tiles end before its own, so the host needs no sizes. Sums are float32 (int32 for int8). The product's rows per tile follow from the mean
rows of an expert, which the host knows. Dimensions as in `moe`: R rows, O and I outputs and inputs of a matrix, E experts.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels of this module run in the interpreter."""


@triton.jit
def multiply_tile(
    x, w, out, ends, tile_ends, source, x_scale, w_scale,
    experts, inner, columns, column_tiles, x_row, w_expert, w_column, w_inner,
    LANES: tl.constexpr, GATHER: tl.constexpr, SCALED: tl.constexpr, INTEGER: tl.constexpr, WIDEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute a tile (BLOCK_R, BLOCK_O) of out[r] = x[source[r]] @ w[expert of r].T.

    ``w`` is read by strides.
    """
    tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    lanes = tl.arange(0, LANES)
    expert = tl.sum((tl.load(tile_ends + lanes, mask=lanes < experts, other=2147483647) <= tile).to(tl.int32), 0)
    if expert < experts:
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        first_tile = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
        row = first + (tile - first_tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        real = row < tl.load(ends + expert)
        shown = column < columns
        origin = tl.load(source + row, mask=real, other=0) if GATHER else row
        step = tl.arange(0, BLOCK_I)
        x_at = x + origin.to(tl.int64)[:, None] * x_row + step[None, :]
        w_at = w + expert.to(tl.int64) * w_expert + column.to(tl.int64)[None, :] * w_column + step[:, None] * w_inner
        total = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.int32 if INTEGER else tl.float32)
        for begin in range(0, inner, BLOCK_I):
            if EVEN:
                left = tl.load(x_at, mask=real[:, None], other=0.0)
                right = tl.load(w_at, mask=shown[None, :], other=0.0)
            else:
                left = tl.load(x_at, mask=real[:, None] & (step[None, :] < inner - begin), other=0.0)
                right = tl.load(w_at, mask=shown[None, :] & (step[:, None] < inner - begin), other=0.0)
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
            x_at += BLOCK_I
            w_at += BLOCK_I * w_inner
        result = total.to(tl.float32)
        if SCALED:
            by_row = tl.load(x_scale + origin, mask=real, other=0.0)
            by_column = tl.load(w_scale + expert * columns + column, mask=shown, other=0.0)
            result = result * by_row[:, None] * by_column[None, :]
        out_at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None] & shown[None, :])


@triton.jit
def weight_gradient_tile(
    grad, x, out, ends, source, columns, inner, column_tiles, inner_tiles, grad_row, x_row,
    GATHER: tl.constexpr, WIDEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Compute a tile (BLOCK_O, BLOCK_I) of the weight gradient.

    out[e] = sum over rows r of e of outer(grad[r], x[source[r]]).
    """
    tiles = column_tiles * inner_tiles
    expert = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles // inner_tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    place = (tl.program_id(0) % inner_tiles) * BLOCK_I + tl.arange(0, BLOCK_I)
    shown, there = column < columns, place < inner
    first, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for begin in range(first, end, BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        real = row < end
        origin = tl.load(source + row, mask=real, other=0) if GATHER else row
        left = tl.load(
            grad + row.to(tl.int64)[:, None] * grad_row + column[None, :],
            mask=real[:, None] & shown[None, :],
            other=0.0,
        )
        right = tl.load(
            x + origin.to(tl.int64)[:, None] * x_row + place[None, :], mask=real[:, None] & there[None, :], other=0.0
        )
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision="ieee")
    out_at = out + (expert.to(tl.int64) * columns + column)[:, None] * inner + place[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=shown[:, None] & there[None, :])


def row_tile(rows: int, experts: int) -> int:
    """Return the rows of a tile: the largest of 128, 64 and 32 that a mean expert fills to 3/4.

    It is 16 if none.
    """
    mean = rows / experts
    return next((size for size in (128, 64, 32) if mean >= 0.75 * size), 16)


def multiply(
    x: Tensor, w: Tensor, ends: Tensor, source: Tensor | None, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> Tensor:
    """Multiply rows of ``x`` (N, I) by their expert's matrix in ``w`` (E, O, I): (R, O).

    ``w`` may have any strides, and the result is in ``dtype``.
    ends: (E,) int32 ends of each expert's rows, the last one R. source: (R,) rows of ``x``, None if R is N. scales: of
    ``x`` (N,) and of ``w`` (E, O), if both hold 8 bits.
    """
    rows, (experts, columns, inner) = len(x) if source is None else len(source), w.shape
    out = x.new_empty(rows, columns, dtype=dtype)
    if not (rows and columns):
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    block_r, block_o, block_i = row_tile(rows, experts), 128, 256 // (2 * x.element_size())
    tile_ends = ((ends.diff(prepend=ends.new_zeros(1)) + block_r - 1) // block_r).cumsum(0).to(torch.int32)
    column_tiles = triton.cdiv(columns, block_o)
    tiles = rows // block_r + min(experts, rows)
    scale_x, scale_w = scales or (x, x)
    with _on(x):
        multiply_tile[(tiles * column_tiles,)](
            x, w, out, ends, tile_ends, x if source is None else source, scale_x, scale_w,
            experts, inner, columns, column_tiles, x.stride(0), *w.stride(),
            LANES=triton.next_power_of_2(experts), GATHER=source is not None, SCALED=scales is not None, INTEGER=x.dtype == torch.int8,
            WIDEN=_widened(x), EVEN=inner % block_i == 0, BLOCK_R=block_r, BLOCK_O=block_o, BLOCK_I=block_i,
            num_warps=8 if block_r == 128 else 4, num_stages=3,
        )  # fmt: skip
    return out


def weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, source: Tensor | None) -> Tensor:
    """Sum outer products of ``grad`` (R, O) and rows of ``x`` (N, I) by expert: (E, O, I).

    Experts without rows have zeros.
    """
    experts, columns, inner = len(ends), grad.shape[1], x.shape[1]
    out = x.new_empty(experts, columns, inner)
    if not len(grad):
        return out.zero_()
    grad, x = (matrix if matrix.stride(-1) == 1 else matrix.contiguous() for matrix in (grad, x))
    block_r, block = 128 // x.element_size(), 64 if x.element_size() == 4 else 128
    column_tiles, inner_tiles = triton.cdiv(columns, block), triton.cdiv(inner, block)
    with _on(x):
        weight_gradient_tile[(experts * column_tiles * inner_tiles,)](
            grad, x, out, ends, x if source is None else source, columns, inner, column_tiles, inner_tiles, grad.stride(0), x.stride(0),
            GATHER=source is not None, WIDEN=_widened(x), BLOCK_R=block_r, BLOCK_O=block, BLOCK_I=block, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def _widened(x: Tensor) -> bool:
    """Return True if operands become float32 before they are multiplied.

    The interpreter multiplies bfloat16 as integers.
    """
    return INTERPRETED and x.dtype == torch.bfloat16


def _on(x: Tensor) -> Any:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
