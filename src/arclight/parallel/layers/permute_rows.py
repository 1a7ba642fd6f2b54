"""Permute rows of a matrix deterministically, by gathers alone in forward and backward.

The expert layers `moe` and `switch_head` of text and the dispatcher of `expert_parallel` move tokens to experts and back with it. Rows are
copied, never added: the same input gives the same bits, in backward too, which checkpoint resumes rely on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def take_rows(
    x: Tensor, index: Tensor, back: Tensor, *, valid: Tensor | None = None, back_valid: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return ``x[index]``, zero where ``valid`` is False.

    Every row of ``x`` is taken once at most.
    x: (R, D). index: (S,) rows of ``x``. back: (R,) where in the result each row of ``x`` went; ``back_valid`` is False for
    rows that were dropped.
    """
    out: Tensor = _Take.apply(x, index, back, valid, back_valid)
    return out


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _gather(x: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
    if not len(x) and valid is not None:
        return x.new_zeros(len(index), *x.shape[1:])  # ``index`` names no row then, and none is valid
    rows = x[index]
    return rows if valid is None else rows.masked_fill_(~valid[:, None], 0)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, back: Tensor, valid: Tensor | None, back_valid: Tensor | None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(back, back_valid)
        return _gather(x, index, valid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back, back_valid = ctx.saved_tensors
        return _gather(grad, back, back_valid), None, None, None, None
