"""Shares of sites: disjoint, together all, the same everywhere."""

import random

import pytest

from arclight.data.sites import IID, Dirichlet, Numbered, drawn, packed


def test_sites_drawn_alike_have_alike_shares():
    homes = [drawn(IID(seed=3), str(i).encode(), "", 4) for i in range(4000)]
    assert {homes.count(site) > 900 for site in range(4)} == {True}
    assert homes == [drawn(IID(seed=3), str(i).encode(), "another source", 4) for i in range(4000)]
    assert homes != [drawn(IID(seed=4), str(i).encode(), "", 4) for i in range(4000)]


def skew(alpha: float) -> float:
    """The mean largest share that one of 4 sites has of a source."""
    largest = []
    for source in "abcdefghij":
        homes = [drawn(Dirichlet(alpha=alpha), f"{source}{i}".encode(), source, 4) for i in range(400)]
        largest.append(max(homes.count(site) for site in range(4)) / 400)
    return sum(largest) / len(largest)


def test_small_concentrations_give_a_source_to_few_sites():
    assert skew(0.05) > 0.85 > 0.65 > skew(1.0) > skew(1000.0)
    assert skew(1000.0) < 0.32


def test_whole_sources_are_packed_by_weight_whatever_the_order():
    sizes = {f"s{i}": random.Random(i).randrange(1, 1000) for i in range(40)}
    home = packed(sizes, 4)
    shuffled = dict(random.Random(5).sample(list(sizes.items()), len(sizes)))
    assert packed(shuffled, 4) == home
    assert set(home.values()) == {0, 1, 2, 3}
    loads = [sum(size for source, size in sizes.items() if home[source] == site) for site in range(4)]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_what_cannot_be_divided_is_said():
    with pytest.raises(ValueError, match=r"2 sources \(a, b\), too few for 3 sites"):
        packed({"a": 1, "b": 2}, 3)
    with pytest.raises(ValueError, match="numbered from 0 to 3"):
        Numbered(number=4, count=4)
    with pytest.raises(ValueError, match="alpha: need number > 0, got 0"):
        Dirichlet(alpha=0)
