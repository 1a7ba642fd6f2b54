"""Draws: without replacement, the same again, fair, and as cheap as what is drawn."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from arclight.federated.coordination.sampling import Roster, Sampler
from arclight.federated.coordination.settings import Hours, Sampling, Waiting

MILLION = 1_000_000


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 300),
    per_round=st.integers(1, 300),
    over=st.floats(0, 2),
    seed=st.integers(),
    round=st.integers(0, 10**6),
)
def test_a_draw_is_without_replacement_and_the_same_again(
    size: int, per_round: int, over: float, seed: int, round: int
) -> None:
    sampler = Sampler(Sampling(per_round=per_round, over_provision=over), Roster(size), seed)
    drawn = sampler.draw(round)
    assert len(set(drawn)) == len(drawn) == sampler.asked
    assert sampler.wanted == min(per_round, size) <= sampler.asked <= size
    assert {int(name) for name in drawn} <= set(range(size))
    assert Sampler(sampler.sampling, Roster(size), seed).draw(round) == drawn
    others = sampler.draw(round, attempt=1, without=drawn)
    assert not set(others) & set(drawn)
    assert len(set(others)) == len(others) == min(sampler.asked, size - len(drawn)) or (
        size == len(drawn) and not others
    )


def test_every_client_is_drawn_as_often_as_any_other() -> None:
    sampler = Sampler(Sampling(per_round=10), Roster(100), 5)
    counts = Counter(name for round in range(600) for name in sampler.draw(round))
    assert chisquare([counts[str(n)] for n in range(100)]).pvalue > 1e-3
    pairs = Counter(frozenset(sampler.draw(round, count=2)) for round in range(1500))
    assert len(pairs) > 1200  # 1294 of 4950 are expected
    assert max(pairs.values()) < 7


def test_a_million_clients_cost_what_is_drawn() -> None:
    tracemalloc.start()
    sampler = Sampler(Sampling(per_round=1000, over_provision=0.3, dropout=0.1), Roster(MILLION), 1)
    drawn = sampler.draw(7)
    retried = sampler.draw(7, count=50, attempt=1, without=drawn)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1100 < len(set(drawn)) < 1230
    assert not set(drawn) & set(retried)
    assert peak < 3 << 20
    assert np.mean([int(name) for name in drawn]) == pytest.approx(MILLION / 2, rel=0.06)


def test_all_clients_come_in_their_own_order() -> None:
    assert Sampler(Sampling(), Roster(["b", "a", "c"]), 1).draw(4) == ("b", "a", "c")


def test_dropouts_are_a_share_and_never_all() -> None:
    sampler = Sampler(Sampling(dropout=0.3), Roster(1000), 2)
    kept = [len(sampler.draw(round)) for round in range(50)]
    assert np.mean(kept) == pytest.approx(700, rel=0.02)
    assert len(set(kept)) > 10
    alone = Sampler(Sampling(dropout=0.99), Roster(2), 2)
    assert {len(alone.draw(round)) for round in range(50)} <= {1, 2}


def test_clients_sleep_at_hours_of_their_own() -> None:
    """A client that is awake at an hour is so every day, those of one hour are a third of all, and hours follow one another."""
    sampler = Sampler(Sampling(hours=Hours(per_round=1.0, length=8.0)), Roster(3000), 3)
    days = [[set(sampler.draw(24 * day + hour)) for hour in range(24)] for day in range(2)]
    assert days[0] == days[1]
    assert [len(awake) for awake in days[0]] == [pytest.approx(1000, rel=0.1)] * 24
    assert len(days[0][0] & days[0][1]) == pytest.approx(7 / 8 * 1000, rel=0.1)
    assert not days[0][0] & days[0][12]
    for_each = Counter(name for awake in days[0] for name in awake)
    assert set(for_each.values()) == {8}
    some = Sampler(Sampling(hours=Hours(length=8.0, outside=0.5)), Roster(3000), 3).draw(0)
    assert len(some) == pytest.approx(1000 + 0.5 * 2000, rel=0.05)


def test_client_seeds_are_distinct() -> None:
    sampler = Sampler(Sampling(), Roster(50), 9)
    seeds = {sampler.seed_of(round, str(n)) for round in range(20) for n in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_names_of_clients() -> None:
    counted, named = Roster(12), Roster(["x", "10", "y"])
    assert [counted.index(name) for name in ("0", "11", "12", "01", "-1", "", "²", "x")] == [0, 11] + [None] * 6
    assert (named.index("10"), named.index("0"), named.name(2)) == (1, None, "y")
    assert counted.sort(["10", "9", "2"]) == ("2", "9", "10")
    with pytest.raises(KeyError, match="z"):
        named.sort(["x", "z"])
    for wrong in (0, [], ["a", "a"]):
        with pytest.raises(ValueError, match="every client a name of its own"):
            Roster(wrong)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Sampling, "per_round", 0), (Sampling, "dropout", 1.0), (Sampling, "over_provision", -0.1),
        (Hours, "length", 0.0), (Hours, "outside", 2.0), (Waiting, "quorum", 0.0), (Waiting, "quorum", 1.1),
        (Waiting, "heartbeat_interval_s", 0.0), (Waiting, "deadline_s", 0.0), (Waiting, "attempts", 0), (Waiting, "grace_s", -1.0),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(kind: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: need .*, got {value}$"):
        kind(**{name: value})


def test_a_roster_is_shown_by_its_ends_or_its_first_names() -> None:
    assert str(Roster(5)) == "0 to 4"
    assert str(Roster(list("abcdefgh"))) == "a, b, c, d, e, f, g, h"
    assert str(Roster(list("abcdefghij"))) == "a, b, c, d, e, f, g, h and 2 more"


def test_the_first_attempt_is_the_one_that_is_drawn_without_a_number() -> None:
    sampler = Sampler(Sampling(per_round=10), Roster(100), 5)
    assert sampler.draw(3) == sampler.draw(3, attempt=0) != sampler.draw(3, attempt=1)
