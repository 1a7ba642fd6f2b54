"""Plan which rank writes which part of a sharded state.

Every rank encodes its own state: values become JSON, tensors stay where they are and are described by the boxes
that this rank holds. `writer`, the only caller, gathers the descriptions, and every rank computes the same plan: each box is
written by one of the ranks that hold it (of the leading replica, if one of them holds it), the one with least to write so far. States
may differ in which entries they have (a pipeline's stages have different layers): their dicts are united.

The JSON is on disk and stays readable (`tree` decodes it). How boxes are balanced may change; the plan must be the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from arclight.checkpoint import tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.tensorfile import METADATA, NAMES, as_bytes
from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.fabric.distributed.shard_regions import Region, local_regions

Path = tuple[str, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


@dataclass(frozen=True)
class TensorShards:
    """Boxes of one tensor that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    same_as: Path | None = None
    """Path of an earlier tensor of the entry with the same memory, which alone is written."""


@dataclass(frozen=True)
class ShardFile:
    """One box of a tensor in a file, which process ``writer`` writes."""

    writer: int
    file: str
    name: str
    box: Box


class EncodedShards(tree.Encoder):
    """Hold one rank's encoded state; its tensors stay where they are."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self.places: dict[Path, TensorShards] = {}
        self.held: dict[Path, tuple[torch.Tensor, list[Region]]] = {}
        """The memory of this process's part, and the boxes in it."""
        self._known: dict[tuple[Any, ...], list[Region]] = {}
        self.meshes: list[dict[str, int]] = []
        self._first: dict[tuple[Any, ...], Path] = {}
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise CheckpointError("a checkpoint's state is a dict with text keys")
        self.counts = tree.counts_of(state)
        self.entries = {name: self.value(value, (name,)) for name, value in state.items()}

    def tensor(self, tensor: torch.Tensor, path: Path) -> Any:
        part = local_tensor(tensor)
        tree.check_tensor(part, path)
        if part.dtype not in NAMES:
            if is_dtensor(tensor):
                raise CheckpointError(f"{'.'.join(path)} is of {tensor.dtype}, which cannot be written by parts")
            bits = self.tensor(as_bytes(tensor), path)
            return {"$": "bits", "of": bits, "dtype": _name(tensor), "shape": list(tensor.shape)}
        if is_dtensor(tensor) and (mesh := _mesh_of(tensor)) not in self.meshes:
            self.meshes.append(mesh)
        try:
            regions = self._regions(tensor, part)
            boxes = tuple((region.offset, region.shape) for region in regions)
        except ValueError as error:
            raise CheckpointError(f"{'.'.join(path)}: {error}") from error
        if path in self.places:
            raise CheckpointError(f"two tensors have the name {'.'.join(path)}: give one of them another")
        shape = tuple(tensor.shape)
        key = (path[0], tree.view_of(part), shape, boxes)
        first = self._first.setdefault(key, path) if boxes else path
        self.held[path] = part, regions
        self.places[path] = TensorShards(_name(tensor), shape, boxes, first if first != path else None)
        return {"$": "spread", "path": list(path)}

    def _regions(self, tensor: Any, part: torch.Tensor) -> list[Region]:
        """Compute `local_regions`, cached for tensors that are sharded alike."""
        if not is_dtensor(tensor):
            return local_regions(tensor)
        key = id(tensor.device_mesh), tuple(tensor.placements), tuple(tensor.shape), tuple(part.shape)
        if key not in self._known:
            self._known[key] = local_regions(tensor)
        return self._known[key]

    def structure(self) -> str:
        """Return a digest of which entries this process has, whatever their values."""
        return _digest(_outline(self.entries))

    def layout(self) -> str:
        """Return a digest of the parts of tensors that this process has."""
        return _digest(
            [(path, place.dtype, place.shape, place.boxes, place.same_as) for path, place in self.places.items()]
        )


@dataclass(frozen=True)
class ShardPlan:
    """Files and writers of every tensor of a state."""

    shards: dict[Path, tuple[ShardFile, ...]]
    places: dict[Path, TensorShards] = field(repr=False)

    def own(self, rank: int) -> dict[Path, list[ShardFile]]:
        """Select the boxes that process ``rank`` writes."""
        mine = {path: [shard for shard in shards if shard.writer == rank] for path, shards in self.shards.items()}
        return {path: shards for path, shards in mine.items() if shards and self.places[path].same_as is None}

    def filled(self, node: Any) -> Any:
        """Replace each tensor in a JSON value by the locations of its shards."""
        if isinstance(node, list):
            return [self.filled(item) for item in node]
        if not isinstance(node, dict):
            return node
        if node.get("$") != "spread":
            return {key: self.filled(value) for key, value in node.items()}
        path = tuple(node["path"])
        place, shards = self.places[path], self.shards[path]
        where = [[shard.file, shard.name, list(shard.box[0])] for shard in shards]
        return {"$": "spread", "dtype": place.dtype, "shape": list(place.shape), "shares": where}


def make_plan(everyones: list[dict[Path, TensorShards]], leading: Collection[int] = ()) -> ShardPlan:
    """Plan which rank writes which shard, from what each rank has.

    ``leading``: ranks of one replica of the model, from which other replicas may differ; a box that some of them hold is written by one
    of these. Raises CheckpointError for a tensor whose dtype or shape differs between ranks, or that all parts together do not make up.
    """
    places: dict[Path, TensorShards] = {}
    holders: dict[Path, dict[Box, list[int]]] = {}
    for rank, found in enumerate(everyones):
        for path, place in found.items():
            first = places.setdefault(path, place)
            if (first.dtype, first.shape) != (place.dtype, place.shape):
                raise CheckpointError(
                    f"{'.'.join(path)} is {first.dtype} {first.shape} on one process and {place.dtype} {place.shape} on rank {rank}: "
                    "tensors of one name must be parts of one tensor"
                )
            if place.same_as is not None and first.same_as is None:
                places[path] = place
            boxes = holders.setdefault(path, {})
            for box in place.boxes:
                boxes.setdefault(box, []).append(rank)
    shards: dict[Path, tuple[ShardFile, ...]] = {}
    load, taken, world_size = [0] * len(everyones), set[tuple[str, str]](), len(everyones)
    for path, boxes in holders.items():
        place = places[path]
        if place.same_as is None:
            _check_cover(path, place, boxes)
            shards[path] = tuple(
                _assign(path, place, box, [rank for rank in ranks if rank in leading] or ranks, load, taken, world_size)
                for box, ranks in boxes.items()
            )
    for path, place in places.items():
        if place.same_as is not None:
            shards[path] = shards[place.same_as]
    return ShardPlan(shards, places)


def _check_cover(path: Path, place: TensorShards, boxes: dict[Box, list[int]]) -> None:
    wanted, found = math.prod(place.shape), sum(math.prod(shape) for _, shape in boxes)
    if found != wanted:
        raise CheckpointError(
            f"{'.'.join(path)} has {wanted} elements, and the parts that processes hold have {found}: they must make up the whole "
            "and not overlap"
        )


def _assign(
    path: Path,
    place: TensorShards,
    box: Box,
    ranks: list[int],
    load: list[int],
    taken: set[tuple[str, str]],
    world_size: int,
) -> ShardFile:
    writer = min(ranks, key=lambda rank: (load[rank], rank))
    load[writer] += math.prod(box[1]) * getattr(torch, place.dtype).itemsize
    entry = "".join(c if c.isalnum() or c in "_-" else "_" for c in path[0])[
        :64
    ]  # file systems take 255 bytes of a name
    file = f"{entry}-{writer + 1:05d}-of-{world_size:05d}.safetensors"
    name = wanted = ".".join(path[1:]) or path[0]
    number = 1
    while (file, name) in taken or name == METADATA:
        number += 1
        name = f"{wanted}#{number}"
    taken.add((file, name))
    return ShardFile(writer, file, name, box)


def merge_entries(first: Any, other: Any) -> Any:
    """Merge two processes' JSON values: dicts and lists of names are united.

    In all else the first counts.
    """
    if isinstance(first, dict) and isinstance(other, dict):
        kinds = first.get("$"), other.get("$")
        if kinds == (None, None):
            both = {key: merge_entries(value, other[key]) if key in other else value for key, value in first.items()}
            return both | {key: value for key, value in other.items() if key not in first}
        if kinds == ("dict", "dict"):
            theirs = {json.dumps(key): (key, value) for key, value in other["items"]}
            items = [
                [key, merge_entries(value, theirs.pop(json.dumps(key), (key, value))[1])]
                for key, value in first["items"]
            ]
            return {"$": "dict", "items": items + [list(pair) for pair in theirs.values()]}
        return first
    if isinstance(first, list) and isinstance(other, list):
        if all(isinstance(item, str) for item in (*first, *other)):
            return list(dict.fromkeys((*first, *other)))
        if len(first) == len(other):
            return [merge_entries(one, two) for one, two in zip(first, other, strict=True)]
    return first


def _outline(node: Any) -> Any:
    """Outline a JSON value: keys, lengths of lists, and names in them."""
    if isinstance(node, dict):
        if node.get("$") == "dict":
            return [[key, _outline(value)] for key, value in node["items"]]
        return {key: _outline(value) for key, value in node.items()} if "$" not in node else node["$"]
    if isinstance(node, list):
        return [item if isinstance(item, str) else _outline(item) for item in node]
    return None


def _mesh_of(tensor: Any) -> dict[str, int]:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"dimension {number}" for number in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
