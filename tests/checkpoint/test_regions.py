"""The boxes of a tensor that a process holds are those that its placements give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from arclight.fabric.distributed.shard_regions import local_regions


def shard_over(
    whole: torch.Tensor, mesh: tuple[int, ...], placements: list[Any], coordinate: tuple[int, ...], fsdp: bool
):
    """Cut a tensor with torch's own functions, from left to right, or as FSDP does from the right."""
    part = whole
    order = list(enumerate(placements))
    if fsdp:  # tensor parallelism first, FSDP after it
        order.sort(key=lambda item: isinstance(item[1], _StridedShard))
        order = [(dim, Shard(p.dim) if isinstance(p, _StridedShard) else p) for dim, p in order]
    for dim, placement in order:
        if isinstance(placement, (Shard, _StridedShard)):
            part = placement._split_tensor(part, mesh[dim], with_padding=False)[0][coordinate[dim]]
    device_mesh = SimpleNamespace(shape=mesh, get_coordinate=lambda: coordinate)
    return SimpleNamespace(
        shape=whole.shape, device_mesh=device_mesh, placements=placements, to_local=lambda: part
    ), part


MESHES = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((3,), [Replicate()]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((4, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=3), Replicate()]),
    ((2, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), Shard(1)]),
    ((2, 3, 2), [Shard(0), _StridedShard(1, split_factor=2), Shard(1)]),
]


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize(("mesh", "placements"), MESHES, ids=str)
def test_regions_are_what_torch_cuts(mesh: tuple[int, ...], placements: list[Any], fsdp: bool) -> None:
    strided = [dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    if fsdp and any(isinstance(placements[dim + 1], Replicate) for dim in strided):
        pytest.skip("FSDP makes strided shards only where tensor parallelism cuts the same dimension")
    for size in range(1, 14):
        whole = torch.arange(size * 11).reshape(size, 11)
        covered = torch.zeros_like(whole)
        for number in range(torch.Size(mesh).numel()):
            coordinate = tuple(int(c) for c in torch.unravel_index(torch.tensor(number), mesh))
            tensor, part = shard_over(whole, mesh, placements, coordinate, fsdp)
            rebuilt = torch.full_like(part, -1)
            for region in local_regions(tensor):
                region.of_part(rebuilt).copy_(region.of_whole(whole))
                region.of_whole(covered).add_(1)
            assert torch.equal(rebuilt, part), (size, coordinate)
        assert covered.min() == covered.max()


def test_local_regions_refuse_partial_and_mismatched_placements() -> None:
    from torch.distributed.tensor import Partial

    whole = torch.zeros(4, 4)
    tensor, _ = shard_over(whole, (2,), [Replicate()], (0,), False)
    tensor.placements = [Partial()]
    with pytest.raises(ValueError, match="still to be summed"):
        local_regions(tensor)
    tensor.placements = [Shard(0)]
    with pytest.raises(ValueError, match="which these placements do not give"):
        local_regions(tensor)
