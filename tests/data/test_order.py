"""Orders that are computed, shared by ranks that come and go: every sample once, whatever the world."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from arclight.data import ResumableLoader
from arclight.data.computed_order import PADDING, EpochOrder


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(size: int, world: int, batch: int, *, computed: bool = True, **options: Any) -> list[ResumableLoader]:
    sampler = {"sampler": EpochOrder(size)} if computed else {"shuffle": True}
    workers = options.pop("num_workers", 0)
    inner = [
        DataLoader(Numbers(size), batch, drop_last=options.get("drop_last", False), num_workers=workers, **sampler)
        for _ in range(world)
    ]
    options.pop("drop_last", None)
    return [ResumableLoader(loader, seed=5, rank=r, world_size=world, **options) for r, loader in enumerate(inner)]


def read(ranks: list[ResumableLoader], epoch: int, start: int, count: int | None = None) -> list[list[int]]:
    """Global batches: those of all ranks together."""
    rows = zip(*(itertools.islice(loader.batches(epoch, start), count) for loader in ranks), strict=True)
    return [torch.cat(list(row)).tolist() for row in rows]


phases = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5)


@given(size=st.integers(1, 120), phases=phases, last=st.tuples(st.integers(1, 5), st.integers(1, 4)))
@settings(max_examples=50, deadline=None)
def test_worlds_may_change_and_every_sample_still_comes_once(
    size: int, phases: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    """Each phase is a run of some ranks and batch size that stops after some batches; the last reads to the end."""
    seen: list[int] = []
    place: int | None = 0
    for world, batch, count in [*phases, (*last, None)]:
        ranks = loaders(size, world, batch)
        starts = {loader.seek(2, place) for loader in ranks}
        assert len(starts) == 1
        (start,) = starts
        rows = read(ranks, 2, start, count)
        assert all(len(row) == world * batch for row in rows)
        seen += [sample for row in rows for sample in row if sample != PADDING]
        place = ranks[0].samples_before(2, start + len(rows))
    assert sorted(seen) == list(range(size))


def test_four_ranks_two_ranks_three_ranks() -> None:
    seen: list[int] = []
    place = 0
    for world, count in ((4, 17), (2, 30), (3, None)):
        ranks = loaders(1000, world, 4)
        start = ranks[0].seek(0, place)
        assert all(loader.seek(0, place) == start for loader in ranks)
        rows = read(ranks, 0, start, count)
        seen += [sample for row in rows for sample in row]
        place = ranks[0].samples_before(0, start + len(rows))
    assert Counter(s for s in seen if s != PADDING) == Counter(range(1000))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_global_order_is_the_same_for_any_world(world: int) -> None:
    def order(ranks: list[ResumableLoader]) -> list[int]:
        rows = zip(*(itertools.chain.from_iterable(b.tolist() for b in loader.batches(3)) for loader in ranks))
        return [sample for row in rows for sample in row if sample != PADDING]

    assert order(loaders(101, world, 3)) == order(loaders(101, 1, 7))


def test_epochs_and_seeds_differ_and_workers_do_not() -> None:
    first, again, second = (read(loaders(50, 1, 5, num_workers=w), e, 0) for w, e in ((0, 0), (2, 0), (0, 1)))
    assert first == again != second
    (loader,) = loaders(50, 1, 5)
    loader.seed = 6
    assert read([loader], 0, 0) != first


@pytest.mark.parametrize("train", [True, False])
def test_the_last_batches_are_filled_up_alike_on_all_ranks(train: bool) -> None:
    ranks = loaders(10, 4, 4, train=train)
    assert {len(loader) for loader in ranks} == {1}
    (row,) = read(ranks, 0, 0)
    assert sorted(row) == [PADDING] * 6 + list(range(10))
    dropped = loaders(10, 2, 4, drop_last=True, train=train)
    (row,) = read(dropped, 0, 0)
    assert len(set(row)) == 8
    assert PADDING not in row


def test_in_order_without_shuffling() -> None:
    order = EpochOrder(10_000, shuffle=False)
    assert list(order) == list(range(10_000))
    assert sorted(EpochOrder(10_000)) == list(range(10_000))
    order = EpochOrder(100)
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first


@given(
    size=st.integers(1, 60),
    before=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 3)),
)
@settings(max_examples=100, deadline=None)
def test_ordinary_shuffled_loaders_leave_nothing_out(
    size: int, before: tuple[int, int, int], after: tuple[int, int]
) -> None:
    """They have no sample that counts for nothing: ranks are made even by repeating, at most one for each rank and seam."""
    world, batch, count = before
    ranks = loaders(size, world, batch, computed=False)
    rows = read(ranks, 1, 0, count)
    place = ranks[0].samples_before(1, len(rows))
    others = loaders(size, after[0], after[1], computed=False)
    start = others[0].seek(1, place)
    assert all(loader.seek(1, place) == start for loader in others)
    seen = Counter(sample for row in [*rows, *read(others, 1, start)] for sample in row)
    assert set(seen) == set(range(size))
    assert sum(seen.values()) - size <= world + 2 * after[0]


def test_loaders_without_a_shared_order_have_no_place() -> None:
    own = DataLoader(Numbers(8), 2, sampler=DistributedSampler(Numbers(8), 2, 0))
    for loader in (
        ResumableLoader(own, rank=0, world_size=2),
        ResumableLoader([1, 2, 3], rank=0, world_size=1),
    ):
        assert loader.samples_before(0, 1) is None
        assert loader.seek(0, 2) is None
