"""Define the rules Muon and NorMuon of `optimizer`: orthogonalised momentum, on any mesh.

Muon: K. Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon.
Scale by root mean square: J. Liu et al. 2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2.
NorMuon: Z. Li et al. 2025, "NorMuon: making Muon more efficient and scalable", arXiv 2510.05491, algorithm 1.

A matrix that is sharded over n ranks must be gathered to be orthogonalised. Gathering every matrix on every rank would send n/2 times
the bytes and compute everything n times. Here matrices of one shape and placement are dealt out (:func:`deal`): one all-to-all brings
each rank some of them in full, another returns the results (:func:`collect`); on a mesh with several dimensions one after the other
along each that shards rows or columns. Dimensions that replicate a tensor, or shard a stack of matrices (experts), exchange nothing.

`MixedOptimizer` calls this for groups of kind ``muon`` and ``normuon``. Keys of ``new_state`` are in checkpoints and stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.optim.stochastic_rounding import DTYPES, Owned, store

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of Jordan's iteration."""
_CHUNK = 2**27
"""Elements orthogonalised in one call: the iteration needs several times their memory."""
_RMS = 0.2
"""Root mean square of AdamW's updates, which ``scale="rms"`` matches (Liu et al. 2025)."""


def newton_schulz(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate U V^T of each of ``matrices`` (..., R, C) = U S V^T.

    Jordan's quintic iteration, in the precision of ``matrices``: X <- aX + (bA + cA^2)X with A = XX^T. After 5 steps, singular values
    above about 0.002 of the matrix's Frobenius norm lie between 0.68 and 1.21 (in exact arithmetic); smaller ones stay smaller.
    """
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    done: torch.Tensor = x.mT if tall else x
    return done


class MuonRule:
    """Update matrices (R, C), or stacks of them (experts; E, R, C), by orthogonalised momentum.

    The ranks that share matrices deal them out (see :mod:`arclight.optim.muon`), so that one of them orthogonalises each in full, as a
    single process would; replicas each do so.
    """

    def new_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if parameter.ndim not in (2, 3):
            raise ValueError(
                f"Muon updates matrices and stacks of them, not a parameter of shape {tuple(parameter.shape)}"
            )
        half = parameter.dtype in (torch.float32, torch.bfloat16)
        dtype = DTYPES[group["state_dtype"]] if half else parameter.dtype
        state = {"momentum_buffer": torch.zeros_like(parameter, dtype=dtype)}
        if group["beta2"] is not None:
            state["neuron_sq"] = _row_zeros(parameter, torch.float32 if half else dtype)
        return state

    def step(self, own: list[Owned], group: Mapping[str, Any], skip: torch.Tensor | None) -> None:
        buckets: dict[Any, list[Owned]] = {}
        for name, parameter, state in own:
            hops = hops_of(parameter)
            key = (
                tuple(parameter.shape[-2:]),
                local_tensor(parameter).shape[-2:],
                parameter.dtype,
                parameter.device,
                hops,
            )
            buckets.setdefault(key, []).append((name, parameter, state))
        dealt = 0
        for key, members in buckets.items():
            dealt += _update(members, key[-1], group, skip, dealt)


def _update(
    own: list[Owned], hops: tuple[Hop, ...], group: Mapping[str, Any], skip: torch.Tensor | None, first: int
) -> int:
    """Update parameters of one shape and placement; return the number of their matrices."""
    rows, columns = own[0][1].shape[-2:]
    pushed = [_momentum(parameter, state, group, skip) for _, parameter, state in own]
    precision = DTYPES.get(group["precision"], pushed[0].dtype) if pushed[0].dtype != torch.float64 else torch.float64
    whole = deal(torch.cat(pushed).to(precision), hops, first)
    done = _orthogonal(whole, group["ns_steps"])
    count = sum(len(part) for part in pushed)
    updates = collect(done, hops, count, first).to(pushed[0].dtype)
    if group["beta2"] is not None:
        updates = _normalise_rows(updates, own, hops, group, skip)
        factor = 1.0 if group["scale"] == "rms" else math.sqrt(max(1, rows / columns))
    else:
        factor = _RMS * math.sqrt(max(rows, columns)) if group["scale"] == "rms" else math.sqrt(max(1, rows / columns))
    lengths = [len(part) for part in pushed]
    for (_, parameter, _), update in zip(own, updates.split(lengths), strict=True):
        part = local_tensor(parameter)
        new = part.to(update.dtype) * (1 - group["lr"] * group["weight_decay"])
        store(part, new.add_(update.view(part.shape), alpha=-group["lr"] * factor), skip)
    return count


def _momentum(
    parameter: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any], skip: torch.Tensor | None
) -> torch.Tensor:
    """Update the momentum and return the direction to orthogonalise.

    Shape (E, r, c), this rank's shards; at least float32.
    """
    assert parameter.grad is not None
    gradient, velocity = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    beta = group["momentum"]
    new = velocity.to(gradient.dtype).lerp(gradient, 1 - beta)
    store(velocity, new, skip)
    direction = gradient.lerp(new, beta) if group["nesterov"] else new
    return _as_stack(direction)


def _as_stack(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape to (E, r, c), with E = 1 for one matrix; a shard may have no elements."""
    return tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    if matrices.numel() == 0:
        return matrices
    count = max(1, _CHUNK // matrices[0].numel())
    return torch.cat([newton_schulz(chunk, steps) for chunk in matrices.split(count)])


def _normalise_rows(
    updates: torch.Tensor, own: list[Owned], hops: tuple[Hop, ...], group: Mapping[str, Any], skip: torch.Tensor | None
) -> torch.Tensor:
    """Normalise each row by its running root mean square (NorMuon); restore the matrix norm.

    ``scale="spectral"`` keeps the norm that the matrix had, ``"rms"`` gives its elements the root mean square of AdamW's.
    """
    rows, columns = own[0][1].shape[-2:]
    squares = summed(updates.square().sum(-1, keepdim=True), hops, -1)
    moments = [local_tensor(state["neuron_sq"]) for _, _, state in own]
    lengths = [math.prod(moment.shape[:-2]) for moment in moments]
    running = torch.cat([_as_stack(moment) for moment in moments]).to(squares.dtype)
    running = running.lerp(squares / columns, 1 - group["beta2"])
    for moment, new in zip(moments, running.split(lengths), strict=True):
        store(moment, new.view(moment.shape), skip)
    factors = 1 / (running.sqrt() + 1e-10)
    norms = torch.stack([squares.sum(-2), (squares * factors.square()).sum(-2)])
    before, after = summed(norms, hops, -2).sqrt()
    target = before if group["scale"] == "spectral" else torch.full_like(before, _RMS * math.sqrt(rows * columns))
    normalised: torch.Tensor = updates * (factors * (target / (after + 1e-10)).unsqueeze(-1))
    return normalised


def _row_zeros(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (..., R, 1), sharded like the rows of ``parameter``."""
    part = local_tensor(parameter)
    zeros = torch.zeros(*part.shape[:-1], 1, dtype=dtype, device=part.device)
    if not is_dtensor(parameter):
        return zeros
    from torch.distributed.tensor import DTensor, Replicate

    last = parameter.ndim - 1
    placements = [Replicate() if getattr(p, "dim", None) == last else p for p in parameter.placements]  # type: ignore[attr-defined]
    shape = torch.Size((*parameter.shape[:-1], 1))
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    sharded: torch.Tensor = DTensor.from_local(zeros, mesh, placements, run_check=False, shape=shape, stride=stride)
    return sharded


@dataclass(frozen=True)
class Hop:
    """Mesh dimension that shards rows or columns: its ranks, and the size of each one's shard."""

    group: Any
    axis: int
    """-2: rows, -1: columns."""
    sizes: tuple[int, ...]
    rank: int


def hops_of(tensor: torch.Tensor) -> tuple[Hop, ...]:
    """Return the mesh dimensions that shard rows or columns, in the order in which they do.

    Empty for a plain tensor. Raises NotImplementedError for placements other than shards and replicas, and for two strided shards.
    """
    if not is_dtensor(tensor):
        return ()
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    known = all(isinstance(placement, (Replicate, Shard, _StridedShard)) for placement in placements)
    strided = [n for n, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if not known or len(strided) > 1:
        raise NotImplementedError(
            f"Muon cannot gather a matrix with placements {placements}: shard or replicate it, or give it another optimizer"
        )
    lengths, found = list(tensor.shape), []
    plain = [n for n in range(len(placements)) if n not in strided]
    for number in (*plain, *strided):  # a strided shard divides what later mesh dimensions have left
        placement, size = placements[number], mesh.size(number)
        if isinstance(placement, Replicate) or size == 1:
            continue
        axis, rank = placement.dim % tensor.ndim, mesh.get_local_rank(number)
        sizes = tuple(int(Shard.local_shard_size_and_offset(lengths[axis], size, r)[0]) for r in range(size))
        lengths[axis] = sizes[rank]
        if axis >= tensor.ndim - 2:
            found.append(Hop(mesh.get_group(number), axis - tensor.ndim, sizes, rank))
    return tuple(found)


def _counts(count: int, hop: Hop, first: int) -> list[int]:
    """Count the matrices of each rank; the remainder goes to the ranks from ``first`` on."""
    size = len(hop.sizes)
    return [count // size + ((rank - first) % size < count % size) for rank in range(size)]


def deal(matrices: torch.Tensor, hops: tuple[Hop, ...], first: int = 0) -> torch.Tensor:
    """Exchange this rank's shards of all matrices for some full ones. A collective.

    ``matrices`` (M, r, c) are exchanged for (M', R, C).
    """
    for hop in reversed(hops):
        counts = _counts(len(matrices), hop, first)
        mine, (_, rows, columns) = counts[hop.rank], matrices.shape
        shapes = [(mine, size, columns) if hop.axis == -2 else (mine, rows, size) for size in hop.sizes]
        lengths = [a * b * c for a, b, c in shapes]
        received = _all_to_all(matrices, [count * rows * columns for count in counts], lengths, hop.group)
        parts = [part.view(shape) for part, shape in zip(received.split(lengths), shapes, strict=True)]
        matrices = torch.cat(parts, dim=hop.axis)
    return matrices


def collect(matrices: torch.Tensor, hops: tuple[Hop, ...], count: int, first: int = 0) -> torch.Tensor:
    """Invert :func:`deal` of ``count`` matrices. A collective."""
    totals = []  # number of matrices before each exchange of deal, which went from the last to the first
    for hop in reversed(hops):
        totals.append(count)
        count = _counts(count, hop, first)[hop.rank]
    for hop, total in zip(hops, reversed(totals), strict=True):
        shares = _counts(total, hop, first)
        parts = matrices.split(list(hop.sizes), dim=hop.axis)
        rows, columns = parts[hop.rank].shape[1:]
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [share * rows * columns for share in shares]
        matrices = _all_to_all(sent, [part.numel() for part in parts], lengths, hop.group).view(total, rows, columns)
    return matrices


def _all_to_all(tensor: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Send ``sent[i]`` elements to process i of ``group``; return those received."""
    import torch.distributed as dist

    result = tensor.new_empty(sum(received))
    dist.all_to_all_single(result, tensor.reshape(-1).contiguous(), received, sent, group=group)
    return result


def summed(tensor: torch.Tensor, hops: tuple[Hop, ...], axis: int) -> torch.Tensor:
    """Sum ``tensor`` in place over the processes that shard ``axis``."""
    import torch.distributed as dist

    for hop in hops:
        if hop.axis == axis:
            dist.all_reduce(tensor, group=hop.group)
    return tensor
