"""Nested batches of any structure: sizes, moves, slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from arclight.fabric.batches import (
    as_tensors,
    batch_size_of,
    count_samples_and_tokens,
    map_tensors,
    move_batch,
    slice_batch,
)
from arclight.fabric.precision.base import floats_to

IDS = torch.zeros(3, 5, dtype=torch.int64)
META, CPU = torch.device("meta"), torch.device("cpu")  # a device other than the CPU that every machine has


def sequences(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(2.0 * n).reshape(n, 2) + 100 * i for i, n in enumerate(lengths)]


PACKED = pack_sequence(sequences(2, 5, 3), enforce_sorted=False)


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IDS, 3, 15),
        ([IDS, IDS], 3, 15),
        ({"tokens": IDS, "labels": IDS, "bytes": torch.zeros(3)}, 3, 15),
        ({"other": torch.zeros(2), "input_ids": IDS}, 3, 15),
        ({"images": torch.zeros(4, 3, 8, 8)}, 4, 0),
        ({"tokens": torch.zeros(3, 5)}, 3, 0),
        (torch.zeros(6, 2), 6, 0),
    ],
)
def test_samples_and_tokens(batch: Any, samples: int, tokens: int) -> None:
    assert count_samples_and_tokens(batch) == (samples, tokens)


@pytest.mark.parametrize("batch", [PACKED, [PACKED, torch.zeros(3)], {"x": PACKED}], ids=["alone", "list", "dict"])
def test_packed_sequences_count_sequences(batch: Any) -> None:
    assert batch_size_of(batch) == 3
    assert count_samples_and_tokens(batch) == (3, 0)


def devices_of(packed: Any) -> list[str]:
    assert isinstance(packed, PackedSequence)
    assert packed.sorted_indices is not None
    assert packed.unsorted_indices is not None
    return [x.device.type for x in (packed.data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)]


def test_packed_sequences_move_but_for_their_batch_sizes() -> None:
    moved = move_batch((PACKED, {"nested": [PACKED]}), META)
    for packed in (moved[0], moved[1]["nested"][0], map_tensors(PACKED, lambda tensor: tensor.to(META))):
        assert devices_of(packed) == ["meta", "cpu", "meta", "meta"]
    assert move_batch(PACKED, CPU) is PACKED


def test_packed_sequences_change_precision() -> None:
    half = floats_to([PACKED], torch.float16)[0]
    assert half.data.dtype == torch.float16
    for ours, reference in zip(unpack_sequence(half), sequences(2, 5, 3), strict=True):
        torch.testing.assert_close(ours.float(), reference, rtol=0, atol=0)


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 3), (2, 3)])
def test_packed_sequences_are_sliced_by_sequences(enforce_sorted: bool, start: int, stop: int) -> None:
    given = sequences(5, 3, 2) if enforce_sorted else sequences(2, 5, 3)
    batch = (pack_sequence(given, enforce_sorted=enforce_sorted), torch.arange(3))
    packed, labels = slice_batch(batch, start, stop, size=3)
    assert labels.tolist() == list(range(start, stop))
    for ours, reference in zip(unpack_sequence(packed), given[start:stop], strict=True):
        assert torch.equal(ours, reference)


def test_packed_sequences_are_not_gathered() -> None:
    with pytest.raises(TypeError, match="pad_packed_sequence"):
        as_tensors({"x": PACKED}, CPU)


class Graph:
    """Class of a user with a ``to`` of its own, which works in place and returns nothing."""

    def __init__(self) -> None:
        self.nodes = torch.zeros(3)

    def to(self, device: torch.device) -> None:
        self.nodes = self.nodes.to(device)


class Encoding(dict[str, torch.Tensor]):
    """Mapping that says itself how it moves, and has more than its items."""

    def __init__(self, items: dict[str, torch.Tensor], origin: str = "", non_blocking: bool = False) -> None:
        super().__init__(items)
        self.origin, self.non_blocking = origin, non_blocking

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()}, self.origin, non_blocking)


@dataclass
class Boxes:
    """Dataclass that keeps its table of classes on the CPU."""

    xyxy: torch.Tensor
    classes: torch.Tensor = field(default_factory=lambda: torch.zeros(2))

    def to(self, device: torch.device) -> Boxes:
        return Boxes(self.xyxy.to(device), self.classes)


class Edges(NamedTuple):
    """Named tuple whose fields are called like methods."""

    of: torch.Tensor
    to: torch.Tensor


def test_objects_move_by_their_own_method_at_any_depth() -> None:
    graph = Graph()
    assert move_batch({"graphs": [graph]}, META)["graphs"][0] is graph
    assert graph.nodes.device == META
    (encoding,) = move_batch((Encoding({"ids": IDS}, origin="text"),), META)
    assert (encoding.origin, encoding.non_blocking, encoding["ids"].device) == ("text", True, META)
    boxes = move_batch([Boxes(torch.zeros(1, 4))], META)[0]
    assert (boxes.xyxy.device, boxes.classes.device) == (META, CPU)
    edges = move_batch(Edges(IDS, IDS), META)
    assert isinstance(edges, Edges)
    assert (edges.of.device, edges.to.device) == (META, META)
