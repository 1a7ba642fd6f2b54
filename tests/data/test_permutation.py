"""Orders that are computed: bijections, uniform, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arclight.data.permutation import keys_of, permute, permute_in_windows


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**62))
@settings(max_examples=150, deadline=None)
def test_every_element_comes_exactly_once(size: int, seed: int) -> None:
    order = permute(np.arange(size), size, keys_of(seed))
    assert sorted(order) == list(range(size))


def test_any_part_is_computed_alone() -> None:
    whole = permute(np.arange(1000), 1000, keys_of(3, 4))
    picked = np.array([999, 0, 17, 17, 500])
    assert permute(picked, 1000, keys_of(3, 4)).tolist() == whole[picked].tolist()


def test_huge_sequences_cost_what_is_asked_for() -> None:
    size = 3 * 10**17 + 1
    found = permute(np.arange(size - 2000, size), size, keys_of(1))
    assert found.min() >= 0
    assert found.max() < size
    assert len(set(found.tolist())) == 2000
    assert stats.kstest(found / size, "uniform").pvalue > 1e-4


def test_a_key_for_each_position() -> None:
    positions = np.array([5, 5, 6, 7])
    epochs = np.array([0, 1, 0, 1])
    expected = [permute(p, 100, keys_of(9, int(e)))[0] for p, e in zip(positions, epochs, strict=True)]
    assert permute(positions, 100, keys_of(9, epochs)).tolist() == expected


def test_positions_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="of a sequence of 10"):
        permute([10], 10, keys_of(0))


@pytest.mark.parametrize("size", [2, 3, 5, 30, 1024])
def test_over_many_keys_each_element_is_everywhere_equally_often(size: int) -> None:
    """Chi-square of where one fixed position comes from, and of the pair of two neighbours' order."""
    keys = keys_of(0, np.arange(20_000))
    first = permute(np.full(20_000, size // 3), size, keys)
    assert stats.chisquare(np.bincount(first, minlength=size)).pvalue > 1e-4
    second = permute(np.full(20_000, size // 3 + 1), size, keys)
    assert stats.binomtest(int((first < second).sum()), 20_000).pvalue > 1e-4


def test_neighbours_are_not_related() -> None:
    order = permute(np.arange(20_000), 20_000, keys_of(5))
    assert abs(stats.pearsonr(order[:-1], order[1:]).statistic) < 0.03
    steps = np.diff(order)
    assert len(set(steps.tolist())) > 10_000


def test_the_order_is_a_promise() -> None:
    """Checkpoints hold positions only: another order after an upgrade would repeat and leave out samples."""
    assert permute(np.arange(10), 10, keys_of(7, 1)).tolist() == [9, 6, 8, 1, 3, 7, 0, 2, 4, 5]


@pytest.mark.parametrize(("size", "window"), [(1000, 64), (1000, 1000), (640, 64), (7, 3), (5, 100), (100, 1)])
def test_windows_are_permuted_and_stay_together(size: int, window: int) -> None:
    found = permute_in_windows(np.arange(size), size, keys_of(3, 1), window)
    assert sorted(found.tolist()) == list(range(size))
    for first in range(0, size - size % window, window):
        assert len(set((found[first : first + window] // window).tolist())) == 1
    for part in (np.arange(size)[::3], np.array([size - 1, 0])):
        assert (permute_in_windows(part, size, keys_of(3, 1), window) == found[part]).all()
    if 2 < window < size // 2:
        assert (found // window != np.arange(size) // window).any()
        within = [tuple(found[first : first + window] % window) for first in range(0, size - size % window, window)]
        assert len(set(within)) == len(within)
    assert (
        permute_in_windows(np.arange(size), size, keys_of(3, 1), None) == permute(np.arange(size), size, keys_of(3, 1))
    ).all()
