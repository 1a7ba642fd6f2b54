"""Whole matrices out of shares, each on one process, and back again.

A matrix that is spread over n processes must be whole to be orthogonalised. To gather every matrix everywhere would send n
times the bytes and do the work n times. Here matrices of one shape are taken together and dealt out: one all-to-all brings
each process its share of them, whole, another takes the results back; a mesh with several dimensions does one after the
other along each that shares rows or columns. Dimensions that replicate a tensor, or share out a stack of matrices (experts),
exchange nothing; replicas do the same work, as they do for everything else between their all-reduces of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from arclight.fabric.spread import is_spread


@dataclass(frozen=True)
class Hop:
    """One mesh dimension along which matrices are shared: the processes there, and who has how much of which axis."""

    group: Any
    axis: int
    """-2: rows, -1: columns."""
    sizes: tuple[int, ...]
    rank: int


def hops_of(tensor: torch.Tensor) -> tuple[Hop, ...]:
    """The mesh dimensions that share out the matrices of ``tensor`` (..., rows, columns), in the order of sharing.

    Raises NotImplementedError for placements other than shards and replicas.
    """
    if not is_spread(tensor):
        return ()
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    known = all(isinstance(placement, (Replicate, Shard, _StridedShard)) for placement in placements)
    strided = [n for n, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if not known or len(strided) > 1:
        raise NotImplementedError(
            f"Muon cannot put a matrix together that is spread as {placements}: gather it by hand"
        )
    lengths, found = list(tensor.shape), []
    plain = [n for n in range(len(placements)) if n not in strided]
    for number in (*plain, *strided):  # a strided share is a share of what the dimensions behind it left
        placement, size = placements[number], mesh.size(number)
        if isinstance(placement, Replicate) or size == 1:
            continue
        axis, rank = placement.dim % tensor.ndim, mesh.get_local_rank(number)
        sizes = tuple(int(Shard.local_shard_size_and_offset(lengths[axis], size, r)[0]) for r in range(size))
        lengths[axis] = sizes[rank]
        if axis >= tensor.ndim - 2:
            found.append(Hop(mesh.get_group(number), axis - tensor.ndim, sizes, rank))
    return tuple(found)


def _dealt(count: int, hop: Hop, first: int) -> list[int]:
    """How many of ``count`` matrices each process gets; those left over go to the processes from ``first`` on."""
    size = len(hop.sizes)
    return [count // size + ((rank - first) % size < count % size) for rank in range(size)]


def deal(matrices: torch.Tensor, hops: tuple[Hop, ...], first: int = 0) -> torch.Tensor:
    """From this process's part of all ``matrices`` (M, r, c) to some of them, whole: (M', R, C). A collective."""
    for hop in reversed(hops):
        counts = _dealt(len(matrices), hop, first)
        mine, (_, rows, columns) = counts[hop.rank], matrices.shape
        shapes = [(mine, size, columns) if hop.axis == -2 else (mine, rows, size) for size in hop.sizes]
        lengths = [a * b * c for a, b, c in shapes]
        received = _all_to_all(matrices, [count * rows * columns for count in counts], lengths, hop.group)
        parts = [part.view(shape) for part, shape in zip(received.split(lengths), shapes, strict=True)]
        matrices = torch.cat(parts, dim=hop.axis)
    return matrices


def collect(matrices: torch.Tensor, hops: tuple[Hop, ...], count: int, first: int = 0) -> torch.Tensor:
    """The inverse of :func:`deal` of ``count`` matrices. A collective."""
    totals = []  # before each of the hops of deal, which went from the last to the first
    for hop in reversed(hops):
        totals.append(count)
        count = _dealt(count, hop, first)[hop.rank]
    for hop, total in zip(hops, reversed(totals), strict=True):
        shares = _dealt(total, hop, first)
        parts = matrices.split(list(hop.sizes), dim=hop.axis)
        rows, columns = parts[hop.rank].shape[1:]
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [share * rows * columns for share in shares]
        matrices = _all_to_all(sent, [part.numel() for part in parts], lengths, hop.group).view(total, rows, columns)
    return matrices


def _all_to_all(tensor: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Flat pieces of ``sent`` elements to each process of ``group``; what came from each, ``received`` elements."""
    import torch.distributed as dist

    result = tensor.new_empty(sum(received))
    dist.all_to_all_single(result, tensor.reshape(-1).contiguous(), received, sent, group=group)
    return result


def summed(tensor: torch.Tensor, hops: tuple[Hop, ...], axis: int) -> torch.Tensor:
    """``tensor`` summed in place over the processes that share ``axis``. A collective where there are any."""
    import torch.distributed as dist

    for hop in hops:
        if hop.axis == axis:
            dist.all_reduce(tensor, group=hop.group)
    return tensor
