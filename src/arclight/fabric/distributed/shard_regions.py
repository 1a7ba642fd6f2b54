"""Compute the regions of a DTensor that this rank holds, for every placement.

Along each dimension the indexes that a process holds are runs. ``Shard`` cuts them in chunks, as ``torch.chunk`` does.
``_StridedShard`` is the placement of FSDP over tensor parallelism: along one dimension of the tensor the later dimension of the mesh
cuts first, and FSDP cuts each of its chunks.

``checkpoint.sharded.plan`` and `sharding` ask which parts of a tensor each rank saves and loads. A wrong region damages checkpoints
without an error: ``tests/checkpoint/test_regions.py`` compares with torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor

_Runs = list[tuple[int, int]]
"""Indexes along one dimension: [start, stop) after [start, stop)."""


@dataclass(frozen=True)
class Region:
    """One box of a tensor that this process holds."""

    offset: tuple[int, ...]
    """Start in the full tensor."""
    shape: tuple[int, ...]
    within: tuple[int, ...]
    """Start in this process's shard."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of this box in the whole tensor."""
        return _box(whole, self.offset, self.shape)

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return a view of this box in the part of the process."""
        return _box(part, self.within, self.shape)


def local_regions(tensor: Any) -> list[Region]:
    """Return the regions of ``tensor`` that this process holds, leaving out empty ones.

    There is one with everything if it is not sharded. Raises ValueError for partial tensors (parts still to be summed), and if this
    process's part has not the shape that the placements say.
    """
    if not is_dtensor(tensor):
        whole = tuple(tensor.shape)
        return [Region((0,) * len(whole), whole, (0,) * len(whole))] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this process takes no part in the tensor
        return []
    local = tuple(local_tensor(tensor).shape)
    for runs in _candidates(tuple(tensor.shape), tensor.device_mesh.shape, coordinate, tensor.placements):
        if tuple(_length(run) for run in runs) == local:
            return [region for region in _boxes(runs) if region.numel]
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)}, sharded as {tensor.placements} over {tensor.device_mesh}, has a part of shape "
        f"{local} on this process, which these placements do not give"
    )


def _candidates(
    shape: tuple[int, ...], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[list[_Runs]]:
    """List the index ranges along every dimension that this process may hold.

    Uneven shards under a strided placement are cut in another order by FSDP than by ``distribute_tensor``; their shapes
    identify it, for the shapes are equal only if the indexes are.
    """
    spec: list[_Runs] = [[(0, size)] for size in shape]
    right: list[_Runs] = [[(0, size)] for size in shape]
    strided = []
    for dim, (size, place, placement) in enumerate(zip(mesh, coordinate, placements, strict=True)):
        kind = type(placement).__name__
        if placement.is_partial():
            raise ValueError("a tensor whose parts are still to be summed (Partial) cannot be saved or loaded by parts")
        if kind == "_StridedShard":
            spec[placement.dim] = _strided(spec[placement.dim], placement.split_factor, size, place)
            strided.append(dim)
        elif placement.is_shard():
            spec[placement.dim] = _chunk(spec[placement.dim], size, place)
            right[placement.dim] = _chunk(right[placement.dim], size, place)
    for dim in reversed(strided):
        axis = placements[dim].dim
        right[axis] = _chunk(right[axis], mesh[dim], coordinate[dim])
    return [spec, right] if strided else [spec]


def _length(runs: _Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _cut(runs: _Runs, low: int, high: int) -> _Runs:
    """Return the indexes number ``low`` to ``high`` of those in ``runs``."""
    found, passed = [], 0
    for start, stop in runs:
        begin, end = max(start, start + low - passed), min(stop, start + high - passed)
        if begin < end:
            found.append((begin, end))
        passed += stop - start
    return found


def _chunk(runs: _Runs, count: int, number: int) -> _Runs:
    size = -(-_length(runs) // count)
    return _cut(runs, number * size, (number + 1) * size)


def _strided(runs: _Runs, factor: int, count: int, number: int) -> _Runs:
    found: _Runs = []
    for piece in range(int(factor)):
        for start, stop in _chunk(_chunk(runs, int(factor), piece), count, number):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return found


def _boxes(runs: list[_Runs]) -> list[Region]:
    axes = []
    for along in runs:
        passed, axis = 0, []
        for start, stop in along:
            axis.append((start, stop - start, passed))
            passed += stop - start
        axes.append(axis)
    found = []
    for box in itertools.product(*axes):
        offset, shape, within = ([part[i] for part in box] for i in range(3))
        found.append(Region(tuple(offset), tuple(shape), tuple(within)))
    return found


def _box(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
