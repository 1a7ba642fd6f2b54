"""Shares of sites: disjoint, together all, the same everywhere."""

import random

import pytest

from arclight.data.sites import IID, Dirichlet, Numbered, Size, divide_by_size, pack_sources, site_at_random


def test_sites_drawn_alike_have_alike_shares():
    homes = [site_at_random(IID(seed=3), str(i).encode(), "", 4) for i in range(4000)]
    assert {homes.count(site) > 900 for site in range(4)} == {True}
    assert homes == [site_at_random(IID(seed=3), str(i).encode(), "another source", 4) for i in range(4000)]
    assert homes != [site_at_random(IID(seed=4), str(i).encode(), "", 4) for i in range(4000)]


def skew(alpha: float) -> float:
    """The mean largest share that one of 4 sites has of a source."""
    largest = []
    for source in "abcdefghij":
        homes = [site_at_random(Dirichlet(alpha=alpha), f"{source}{i}".encode(), source, 4) for i in range(400)]
        largest.append(max(homes.count(site) for site in range(4)) / 400)
    return sum(largest) / len(largest)


def test_small_concentrations_give_a_source_to_few_sites():
    assert skew(0.05) > 0.85 > 0.65 > skew(1.0) > skew(1000.0)
    assert skew(1000.0) < 0.32


def test_whole_sources_are_packed_by_weight_whatever_the_order():
    sizes = {f"s{i}": random.Random(i).randrange(1, 1000) for i in range(40)}
    home = pack_sources(sizes, 4)
    shuffled = dict(random.Random(5).sample(list(sizes.items()), len(sizes)))
    assert pack_sources(shuffled, 4) == home
    assert set(home.values()) == {0, 1, 2, 3}
    loads = [sum(size for source, size in sizes.items() if home[source] == site) for site in range(4)]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_invalid_site_divisions_are_refused():
    with pytest.raises(ValueError, match=r"2 sources \(a, b\), too few for 3 sites"):
        pack_sources({"a": 1, "b": 2}, 3)
    with pytest.raises(ValueError, match="numbered from 0 to 3"):
        Numbered(number=4, count=4)
    with pytest.raises(ValueError, match="alpha: need number > 0, got 0"):
        Dirichlet(alpha=0)


@pytest.mark.parametrize("shares", [(), (4.0, 2.0, 1.0), (1.0, 1.0, 100.0), (0.5, 3.0, 0.5, 2.0)])
def test_sizes_are_divided_exactly(shares):
    sizes = {f"t{i}".encode(): random.Random(i).randrange(0, 1000) for i in range(3000)}
    count = len(shares or "four")
    division = divide_by_size(Size(shares=shares, seed=7), sizes.items(), count)
    total, parts = sum(sizes.values()), shares or [1.0] * count
    loads = [sum(size for key, size in sizes.items() if division.site_of(key) == site) for site in range(count)]
    assert sum(loads) == total
    for load, part in zip(loads, parts, strict=True):
        assert abs(load - total * part / sum(parts)) <= max(sizes.values())
    shuffled = random.Random(3).sample(list(sizes.items()), len(sizes))
    assert divide_by_size(Size(shares=shares, seed=7), shuffled, count) == division
    other = divide_by_size(Size(shares=shares, seed=8), sizes.items(), count)
    assert [other.site_of(key) for key in sizes] != [division.site_of(key) for key in sizes]


def test_equal_samples_share_a_site_and_few_samples_are_not_cut():
    division = divide_by_size(Size(), [(b"same", 5)] * 9 + [(b"other", 40)], 2)
    assert {division.site_of(b"same"), division.site_of(b"other")} == {0, 1}
    assert divide_by_size(Size(), [], 3).site_of(b"x") in range(3)
    for number in range(20):
        assert (
            divide_by_size(Size(shares=(9.0, 1.0)), [(str(number).encode(), 3)], 2).site_of(str(number).encode()) == 0
        )


def test_invalid_site_shares_are_refused():
    with pytest.raises(ValueError, match="one for each of 3 sites, got 2"):
        divide_by_size(Size(shares=(1.0, 2.0)), [], 3)
    for wrong in ((1.0, 0.0), (1.0, float("nan")), (-1.0,), (float("inf"), 1.0)):
        with pytest.raises(ValueError, match="shares"):
            Size(shares=wrong)
