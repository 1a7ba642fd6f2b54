"""Compute cross-entropy in float32 without full logits, over sharded vocabularies.

`LanguageModel` computes its loss here, and the planner counts its cost (`workload`). `UnigramLoss` makes losses of different
tokenizers comparable. Loss and gradients must agree with torch's cross-entropy of full logits, up to rounding; chunk sizes may be
tuned, which changes the last bits. `torch.nn.functional.linear_cross_entropy` of torch 2.13 returns losses in bfloat16, and takes no sharded
vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

IGNORED = -100
"""The label of a token that is not to be predicted."""
CHUNK_ELEMENTS = 1 << 22
"""Most logits held at a time (16 MiB of float32), unless chunks would then have under 256 rows or be more than `CHUNKS`."""
CHUNKS = 8
"""Most chunks. Each adds to a gradient as large as the weights, which costs as much as its products if the chunk has only a few hundred
rows."""


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None, softcap: float | None = None
) -> Tensor:  # fmt: skip
    """Sum -log softmax(hidden weight^T)[label] over the labels that are not -100, in float32.

    hidden: (..., D). weight: (V, D), or a DTensor whose rows lie on the processes of one mesh dimension; then every process
    must call this with the same hidden states, and the gradient by them is the part that its rows give, to be summed over
    processes as `arclight.parallel.layers.tensor_parallel` does it. labels: (...), int64.
    chunk: rows of logits at a time (default: about four million logits, or an eighth of all). softcap: logits become softcap * tanh(logits / softcap).
    Gradients are computed on the way forward and kept in the place of logits: each matrix product is done once.
    A label outside of the vocabulary raises IndexError on a CPU (not in compiled code); elsewhere, where a check would wait for the
    device, the loss and the gradients of its row are NaN.
    """
    group, first, rows = None, 0, weight
    if isinstance(weight, DTensor):
        rows, group, first = _own_rows(weight)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    _check_labels(targets, weight.shape[0])
    size = chunk or max(256, CHUNK_ELEMENTS // rows.shape[0], -(-len(flat) // CHUNKS))
    total: Tensor = _Chunked.apply(flat, rows, targets, size, group, first, weight.shape[0], softcap)
    return total


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    """Raise IndexError for a label without a row of logits, if reading it makes no device wait."""
    if labels.device.type != "cpu" or type(labels) is not Tensor or torch.compiler.is_compiling():
        return
    unknown = _unknown(labels, vocabulary)
    if bool(unknown.any()):
        raise IndexError(
            f"label {int(labels[unknown][0])} is outside of the vocabulary of {vocabulary}: use {IGNORED} where nothing is to be "
            "predicted, and a tokenizer that has no more tokens than the model"
        )


def _unknown(labels: Tensor, vocabulary: int) -> Tensor:
    return (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))


def cross_entropy_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross-entropy of logits (..., V) that are there already."""
    wide = logits.reshape(-1, logits.shape[-1]).float()
    return torch.nn.functional.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def _own_rows(weight: DTensor) -> tuple[Tensor, Any, int]:
    """Return this process's rows of a sharded weight, its process group, and the first row."""
    cut = [i for i, placement in enumerate(weight.placements) if isinstance(placement, Shard)]
    if len(cut) > 1 or any(weight.placements[i] != Shard(0) for i in cut):
        raise ValueError(
            f"the output's weight is placed {weight.placements}; the loss needs it cut by rows over one dimension"
        )
    own = weight.to_local()
    if not cut:
        return own, None, 0
    mesh = weight.device_mesh
    size, rank = mesh.size(cut[0]), mesh.get_local_rank(cut[0])
    if weight.shape[0] % size:
        raise ValueError(f"a vocabulary of {weight.shape[0]} does not divide by {size}: pad it (vocab_size)")
    return own, mesh.get_group(cut[0]), rank * own.shape[0]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, size: int, group: Any, first: int, vocabulary: int,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        w_VD = weight.to(dtype or hidden.dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        d_weight: Tensor | None = None
        total = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                h_ND, labels_N = hidden[start : start + size].to(w_VD.dtype), labels[start : start + size]
                logits_NV = (h_ND @ w_VD.T).float()
                losses_N, d_logits_NV = _losses(
                    logits_NV, labels_N, group, first, vocabulary, softcap, wants_hidden or wants_weight
                )
                total = total + losses_N.sum()
                if d_logits_NV is None:
                    continue
                d_logits_NV = d_logits_NV.to(w_VD.dtype)
                if d_hidden is not None:
                    d_hidden[start : start + size] = d_logits_NV @ w_VD
                if not wants_weight:
                    continue
                part_VD = d_logits_NV.T @ h_ND
                d_weight = part_VD.float() if d_weight is None else d_weight.add_(part_VD)
        if wants_weight and d_weight is None:
            d_weight = torch.zeros_like(weight)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only under create_graph: what comes out would count as constant
            raise RuntimeError(
                "this cross_entropy keeps gradients and no logits, so it has no second derivative: use cross_entropy_of_logits with "
                "create_graph=True"
            )
        d_hidden, d_weight = (None if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors)
        return d_hidden, d_weight, None, None, None, None, None, None


def _losses(
    logits_NV: Tensor, labels_N: Tensor, group: Any, first: int, vocabulary: int, softcap: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute each row's loss and its gradient by the logits.

    A loss is 0 if ignored, NaN if no process has the label.
    """
    slope = None
    if softcap is not None:
        squashed = (logits_NV / softcap).tanh()
        slope, logits_NV = 1 - squashed.square(), softcap * squashed
    valid_N = labels_N != IGNORED
    own_N = valid_N & (labels_N >= first) & (labels_N < first + logits_NV.shape[1])
    index_N1 = torch.where(own_N, labels_N - first, 0)[:, None]
    peak_N1 = logits_NV.amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(peak_N1, dist.ReduceOp.MAX, group=group)
    shifted_NV = logits_NV - peak_N1
    picked_N = torch.where(own_N, shifted_NV.gather(1, index_N1)[:, 0], 0.0)
    weights_NV = shifted_NV.exp_()
    both_2N = torch.stack((weights_NV.sum(-1), picked_N))
    if group is not None:
        dist.all_reduce(both_2N, group=group)
    sums_N, picked_N = both_2N
    counted_N = valid_N.to(sums_N.dtype).masked_fill(_unknown(labels_N, vocabulary), torch.nan)
    losses_N = torch.where(valid_N, (sums_N.log() - picked_N) * counted_N, 0.0)
    if not with_gradient:
        return losses_N, None
    d_NV = weights_NV.mul_((counted_N / sums_N)[:, None])
    d_NV.scatter_add_(1, index_N1, -own_N.to(d_NV.dtype)[:, None])
    return losses_N, d_NV if slope is None else d_NV * slope


class UnigramLoss:
    """Sum -log p(label) of labels, p being the smoothed share of each token in a text.

    It is what a model pays that knows how often each token occurs, and nothing else. A loss minus it compares between vocabularies, of
    which a larger one has fewer, less likely tokens (DEPT, Iacob et al. 2025).

    p(v) = (count(v) + smoothing) / (all counts + smoothing * V), with V the tokens of the tokenizer: no token costs infinitely much.
    counts: (V,), by token id. smoothing: above 0; 1 is Laplace's. Raises ValueError for no counts.
    """

    def __init__(self, counts: npt.NDArray[np.uint64], smoothing: float) -> None:
        if not counts.size:
            raise ValueError("no counts of tokens: the vocabulary is empty")
        smoothed = counts.astype(np.float64) + smoothing
        self._cost = torch.from_numpy(-np.log(smoothed / smoothed.sum()).astype(np.float32))

    def __call__(self, labels: Tensor) -> Tensor:
        """Return the sum (nats) over the labels (...) that are not -100, a scalar in float64."""
        if self._cost.device != labels.device:
            self._cost = self._cost.to(labels.device)
        return self._cost[labels[labels != IGNORED]].sum(dtype=torch.float64)
