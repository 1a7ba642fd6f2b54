"""Mixtures: shares as asked for, every part read through before it repeats, all from the position alone."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from arclight.data import ResumableLoader
from arclight.data.computed_order import PADDING
from arclight.data.mixture import MixtureOrder

weights_of_parts = st.lists(st.tuples(st.integers(1, 700), st.floats(0, 5)), min_size=1, max_size=5).filter(
    lambda parts: sum(weight for _, weight in parts) > 0.1
)


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def ids(order: MixtureOrder, first: int, last: int, seed: int = 3) -> np.ndarray:
    """Samples ``first`` to ``last``, counted from the beginning of training."""
    epochs, positions = np.divmod(np.arange(first, last), len(order))
    parts = [order.sample_ids(positions[epochs == e], epoch=int(e), seed=seed) for e in np.unique(epochs)]
    return np.concatenate(parts)


@given(parts=weights_of_parts, samples=st.integers(50, 3000), seed=st.integers(0, 2**40))
@settings(max_examples=12, deadline=None)
def test_shares_and_turns(parts: list[tuple[int, float]], samples: int, seed: int) -> None:
    """After any number of blocks, across epochs, no sample of a part has come twice more often than another."""
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    order = MixtureOrder(sizes, weights, samples=samples)
    block = min(samples, 1024)
    whole = 4096 - 4096 % block
    found = ids(order, 0, whole, seed)
    firsts = np.cumsum([0, *sizes])
    for number, (low, high) in enumerate(pairwise(firsts)):
        mine = found[(found >= low) & (found < high)]
        share = weights[number] / sum(weights)
        assert abs(len(mine) - whole * share) <= whole / block + 1e-6  # one of each block
        counts = Counter(mine.tolist())
        often = [counts[sample] for sample in range(low, high)]
        assert max(often) - min(often) <= 1


@given(first=st.integers(0, 9000), count=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_any_position_is_known_without_those_before(first: int, count: int) -> None:
    fresh = MixtureOrder([40, 300, 7], [1, 2, 0.5], samples=500)
    whole = MixtureOrder([40, 300, 7], [1, 2, 0.5], samples=500)
    assert ids(fresh, first, first + count).tolist() == ids(whole, 0, first + count)[first:].tolist()


def test_shares_follow_their_schedule() -> None:
    order = MixtureOrder([10**6, 10**6], [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], at=[0.0, 1.0, 2.0], samples=100_000)
    second = ids(order, 0, 200_000) >= 10**6
    for moment in (0.1, 0.5, 0.9, 1.5):
        around = slice(int(moment * 1e5) - 5000, int(moment * 1e5) + 5000)
        assert second[around].mean() == pytest.approx(min(moment, 1.0), abs=0.02)
    assert order.shares(np.array([0.25, 3.0])).tolist() == [[0.75, 0.25], [0.0, 1.0]]


def test_parts_are_interleaved_and_seeds_differ() -> None:
    order = MixtureOrder([1000, 1000], [1, 1])
    found = ids(order, 0, 1000) >= 1000
    runs = int((found[1:] != found[:-1]).sum())
    assert 430 < runs < 570
    assert ids(order, 0, 50, seed=1).tolist() != ids(order, 0, 50, seed=2).tolist()
    assert ids(order, 0, 50, seed=1).tolist() == ids(order, 0, 50, seed=1).tolist()


def test_a_part_without_a_share_is_never_read() -> None:
    order = MixtureOrder([5, 0, 3, 0], [0.1, 0, 0.2, 0], samples=10_000)
    assert set(ids(order, 0, 20_000).tolist()) == set(range(8))
    assert sorted(set(MixtureOrder([3], [2.0], samples=9))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "weights", "options", "message"),
    [
        ([1, 2], [1], {}, "a weight for each of 2 parts"),
        ([1, 2], [[1, 2], [1]], {"at": [0, 1]}, "at each of 2 points"),
        ([1, 2], [1, -1], {}, "0 or more"),
        ([1, 2], [[0, 1], [0, 1]], {"at": [0, 1]}, "not all 0"),
        ([1, 2], [[0, 1], [1, 1]], {"at": [1, 0]}, "must rise"),
        ([0, 2], [1, 1], {}, r"parts \[0\] have a weight but no samples"),
    ],
)
def test_impossible_mixtures_are_refused(sizes: list[int], weights: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixtureOrder(sizes, weights, **options)


@given(worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(5, 11), st.integers(0, 6)), max_size=3))
@settings(max_examples=10, deadline=None)
def test_worlds_may_change_in_the_middle_of_a_mixture(worlds: list[tuple[int, int, int]]) -> None:
    """Ranks read together what one process reads, though their number and the batch size change."""
    order = MixtureOrder([40, 300, 7], [[1, 0.2], [2, 2], [0.5, 0.5]], at=[0, 1], samples=500)
    whole = Counter(order.sample_ids(np.arange(500), epoch=1, seed=9).tolist())
    seen: Counter[int] = Counter()
    place: int | None = 0
    for world, batch, count in [*worlds, (3, 20, 500)]:
        inner = DataLoader(Numbers(), batch, sampler=order)
        ranks = [ResumableLoader(inner, seed=9, rank=rank, world_size=world) for rank in range(world)]
        start = [loader.seek(1, place) for loader in ranks][0]
        for loader in ranks:
            for samples in islice(loader.batches(1, start), count):
                seen.update(sample for sample in samples.tolist() if sample != PADDING)
        place = ranks[0].samples_before(1, min(start + count, len(ranks[0])))
    assert seen == whole


@pytest.mark.parametrize(
    ("sizes", "weights"), [([20], [1.0]), ([20, 7, 100], [20, 7, 100]), ([1], [3.0]), ([1023], [1])]
)
def test_an_epoch_of_a_small_corpus_shows_each_sample_once(sizes: list[int], weights: list[float]) -> None:
    order = MixtureOrder(sizes, weights)
    everything = list(range(sum(sizes)))
    orders = [ids(order, epoch * len(order), (epoch + 1) * len(order)).tolist() for epoch in range(4)]
    assert all(sorted(found) == everything for found in orders)
    assert len(sizes) + sum(sizes) < 10 or len({tuple(found) for found in orders}) == 4
