"""Combined loaders: what each mode gives, and that a combination starts anywhere with the same bits."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from arclight.data import CombinedLoader, ResumableCombination, ResumableLoader

SIDE_BY_SIDE = ["min_size", "max_size_cycle", "max_size"]


class Numbers(Dataset[torch.Tensor]):
    """Numbers with noise, so that order and random draws both show."""

    def __init__(self, count: int, offset: int = 0) -> None:
        self.count, self.offset = count, offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.offset + index + torch.rand(())


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            yield number + torch.rand(())


class Stateful(Stream):
    """A stream that goes on from its state."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.at = self.at, 0
        for number in range(start, self.count):
            self.at, self.read = number + 1, self.read + 1
            yield number + torch.rand(())
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Named:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [(["a", 0], 0, 0), (["b", 1], 1, 0)]),
        ("max_size_cycle", [(["a", 0], 0, 0), (["b", 1], 1, 0), (["a", 2], 2, 0)]),
        ("max_size", [(["a", 0], 0, 0), (["b", 1], 1, 0), ([None, 2], 2, 0)]),
        ("sequential", [("a", 0, 0), ("b", 1, 0), (0, 0, 1), (1, 1, 1), (2, 2, 1)]),
    ],
)
def test_each_mode_gives_batches_indices_and_length(mode: Any, expected: list[Any]) -> None:
    combined = CombinedLoader([["a", "b"], range(3)], mode)
    assert list(combined) == expected
    assert len(combined) == len(expected)
    assert list(combined) == expected  # and again


@pytest.mark.parametrize("container", [Pair, Named, lambda left, right: {"x": {"left": left}, "right": right}])
def test_rows_have_the_shape_of_the_tree(container: Any) -> None:
    tree = container(range(2), range(5, 7))
    combined = CombinedLoader(tree, "min_size")
    assert [row for row, _, _ in combined] == [container(0, 5), container(1, 6)]
    assert combined.flattened == [range(2), range(5, 7)]
    combined.flattened = [range(1), range(9, 10)]
    assert combined.iterables == container(range(1), range(9, 10))
    assert [row for row, _, _ in combined] == [container(0, 9)]
    with pytest.raises(ValueError, match=r"flattened length \(1\)"):
        combined.flattened = [range(1)]


def test_limits_hold_for_each_part_and_for_rows() -> None:
    combined = CombinedLoader([range(3), range(4)], "sequential")
    combined.limits = [0, 2]
    assert list(combined) == [(0, 0, 1), (1, 1, 1)]
    combined.limits = [1, float("inf")]
    assert [index for _, _, index in combined] == [0, 1, 1, 1, 1]
    rows = CombinedLoader([range(3), range(9)], "max_size_cycle")
    rows.limits = 4
    assert len(list(rows)) == len(rows) == 4
    with pytest.raises(ValueError, match=r"number of limits \(1\) and number of iterables \(2\)"):
        rows.limits = [1]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [[0, 0], [1, 1]]),
        ("max_size", [[0, 0], [1, 1], [None, 2], [None, 3]]),
        ("max_size_cycle", [[0, 0], [1, 1], [0, 2], [1, 3]]),
    ],
)
def test_limits_are_of_each_loader(mode: Any, expected: list[Any]) -> None:
    combined = CombinedLoader([range(5), range(7)], mode)
    combined.limits = [2, 4]
    assert [row for row, _, _ in combined] == expected
    assert len(combined) == len(expected)
    for start in range(len(expected) + 1):
        made = ResumableCombination(combined, [ResumableLoader(part) for part in combined.flattened])
        made.limits = [2, 4]
        assert list(made.batches(0, start)) == expected[start:]
        parts = [DataLoader(Numbers(5)), DataLoader(Numbers(7))]
        made = ResumableCombination(CombinedLoader(parts, mode), [ResumableLoader(part) for part in parts])
        made.limits = [2, 4]
        rows = [[None if part is None else int(part) for part in row] for row in made.batches(0, start)]
        assert rows == expected[start:]


def test_an_empty_loader_cannot_be_cycled() -> None:
    for sizes in ((0, 3), (3, 0)):
        combined = CombinedLoader([range(size) for size in sizes], "max_size_cycle")
        assert list(combined) == []
        assert len(combined) == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="Unsupported mode 'longest'"):
        CombinedLoader([range(1)], "longest")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="iter"):
        len(CombinedLoader([range(1)]))
    endless = CombinedLoader([range(3), Stream(3)], "max_size")
    iter(endless)
    with pytest.raises(TypeError, match="length"):
        len(endless)


def test_it_survives_pickling_under_way() -> None:
    combined = CombinedLoader({"a": DataLoader(Numbers(3)), "b": range(3)}, "min_size")
    next(iter(combined))
    copy = pickle.loads(pickle.dumps(combined))
    assert [sorted(row) for row, _, _ in copy] == [["a", "b"]] * 3


def test_only_the_loader_being_read_has_started() -> None:
    opened = []

    class Noting(list[int]):
        def __iter__(self) -> Iterator[int]:
            opened.append(len(self))
            return super().__iter__()

    parts = [Noting([1, 2]), Noting([1, 2, 3])]
    iter(CombinedLoader(parts, "sequential"))
    assert opened == [2]
    iter(CombinedLoader(parts, "min_size"))
    assert opened == [2, 2, 3]


def combination(parts: list[Any], mode: Any, **settings: Any) -> ResumableCombination:
    combined = CombinedLoader({str(number): part for number, part in enumerate(parts)}, mode)
    return ResumableCombination(combined, [ResumableLoader(part, seed=5, **settings) for part in combined.flattened])


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value is None else value.tolist() for key, value in row.items()}


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        *((mode, 0) for mode in SIDE_BY_SIDE),
        ("min_size", 2),
        *(pytest.param(mode, 2, marks=pytest.mark.slow) for mode in ("max_size_cycle", "max_size")),
    ],
)
def test_a_combination_starts_at_any_row(mode: Any, workers: int) -> None:
    def make() -> ResumableCombination:
        parts = [
            DataLoader(Numbers(5), batch_size=2, shuffle=True, num_workers=workers),
            DataLoader(Numbers(14, 100), batch_size=2, shuffle=True, num_workers=workers),
        ]
        return combination(parts, mode)

    rows = [plain(row) for row in make().batches(3)]
    assert len(rows) == len(make()) == {"min_size": 3, "max_size_cycle": 7, "max_size": 7}[mode]
    for start in range(len(rows) + 1) if workers == 0 else (4,):
        assert [plain(row) for row in make().batches(3, start)] == rows[start:]


def test_each_cycle_has_an_order_of_its_own() -> None:
    made = combination(
        [DataLoader(Numbers(4), shuffle=True), DataLoader(Numbers(12, 100), shuffle=True)], "max_size_cycle"
    )
    short = [row["0"].item() for row in made.batches(0)]
    cycles = [short[0:4], short[4:8], short[8:12]]
    assert all(sorted(int(x) for x in cycle) == [0, 1, 2, 3] for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) == 3


@pytest.mark.parametrize("mode", SIDE_BY_SIDE)
@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_parts_without_length_go_on_from_the_state(mode: Any, kind: type[Stream]) -> None:
    def make() -> tuple[ResumableCombination, Stream]:
        stream = kind(5)
        return combination([DataLoader(stream, batch_size=2), DataLoader(Numbers(9), shuffle=True)], mode), stream

    made, _ = make()
    rows, states = [], []
    for number, row in enumerate(made.batches(1), 1):
        rows.append(plain(row))
        states.append(made.state_dict(number, epoch=1))
    assert not made.sized or mode == "min_size"
    for start in range(1, len(rows)):
        resumed, stream = make()
        resumed.load_state_dict(states[start - 1])
        assert [plain(row) for row in resumed.batches(1, start)] == rows[start:]
        if isinstance(stream, Stateful) and mode == "min_size":
            assert stream.read <= 5 - 2 * start + 1  # nothing was read twice


def test_without_a_state_the_position_is_reached_by_reading() -> None:
    parts = [DataLoader(Stream(5)), DataLoader(Numbers(12), shuffle=True)]
    rows = [plain(row) for row in combination(parts, "max_size_cycle").batches(0)]
    assert [plain(row) for row in combination(parts, "max_size_cycle").batches(0, 7)] == rows[7:]


def test_every_part_is_shared_out_among_ranks() -> None:
    seen: dict[str, list[int]] = {"0": [], "1": []}
    for rank in range(2):
        parts = [DataLoader(Numbers(6), shuffle=True), DataLoader(Numbers(10, 100), shuffle=True)]
        for row in combination(parts, "max_size", rank=rank, world_size=2).batches(0):
            for key, value in row.items():
                if value is not None:
                    seen[key].append(int(value.item()))
    assert sorted(seen["0"]) == list(range(6))
    assert sorted(seen["1"]) == list(range(100, 110))


def test_training_cannot_be_sequential() -> None:
    with pytest.raises(ValueError, match="does not support"):
        combination([range(3)], "sequential")
