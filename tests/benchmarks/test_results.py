"""Ratios and their spread: known ratios, ties, drifts, too few samples; what pages and JSON say of them."""

from __future__ import annotations

import json
import math
import random
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.results import Ratio, median, paired, publish, said, totals


def noisy(ratio: float, pairs: int, seed: int) -> tuple[list[float], list[float]]:
    """Pairs whose true ratio is ``ratio``, on a machine that gets three times as slow and strikes one side of some."""
    generator = random.Random(seed)
    load = [1 + 2 * place / pairs for place in range(pairs)]
    below, above = (
        [one * generator.lognormvariate(0, 0.1) * generator.choices((1, 4), (19, 1))[0] for one in load] for _ in "ab"
    )
    return [ratio * one for one in above], below


def test_exact_ratios_have_no_spread() -> None:
    found = paired([3.0, 6.0, 1.5, 3.0, 9.0, 12.0], [2.0, 4.0, 1.0, 2.0, 6.0, 8.0])
    assert (found.value, found.low, found.high, found.smallest, found.largest) == (1.5,) * 5
    assert found.samples == 6
    assert found.difference == "+50.0 %"


def test_intervals_cover_the_true_ratio_at_their_nominal_rate() -> None:
    held = [(found := paired(*noisy(1.1, 100, seed))).low <= 1.1 <= found.high for seed in range(50)]
    assert 43 <= sum(held) <= 50


def test_small_ratios_are_detected_among_widely_varying_pairs() -> None:
    found = paired(*noisy(1.1, 200, 1))
    assert found.smallest < 0.9
    assert found.largest > 3
    assert 1.0 < found.low < found.value < found.high < 1.2
    assert found.high - found.low < 0.1
    assert found.difference.startswith("+")


def test_slow_drifts_of_the_ratio_widen_the_interval() -> None:
    drift = [1 + 0.3 * math.sin(place / 15) for place in range(120)]
    mixed = random.Random(0).sample(drift, len(drift))
    wide, narrow = median(drift), median(mixed)
    assert wide.value == narrow.value
    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)


def test_ties_show_no_difference() -> None:
    times = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]
    found = paired(times, times)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.difference == "no difference seen"


def test_an_interval_that_includes_one_is_no_win() -> None:
    found = paired([1.1, 0.9, 1.1, 0.95, 1.2, 0.9, 1.1, 1.1], [1.0] * 8)
    assert found.value > 1.0 > found.low
    assert found.difference == "no difference seen"
    assert said(found).endswith("no difference seen")


def test_differences_are_reported_both_ways() -> None:
    below = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9]
    assert paired([value * 0.75 for value in below], below).difference == "-25.0 %"
    assert paired([value * 2.5 for value in below], below).difference == "2.5 times"


def test_overheads_are_compared_with_zero() -> None:
    ratio = paired([1.04, 1.05, 1.06, 1.05, 1.04, 1.06], [1.0] * 6)
    more = ratio.minus_one()
    assert more.value == pytest.approx(0.05)
    assert more.smallest == pytest.approx(0.04)
    assert more.difference == ratio.difference == "+5.0 %"
    times = [1.0, 2.0] * 4
    assert paired(times, times[::-1]).minus_one().difference == "no difference seen"


def test_too_few_samples_claim_nothing() -> None:
    found = paired([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert found.value == 2.0
    assert found.difference == "too few samples to tell"


def test_shares_have_a_spread_and_no_difference() -> None:
    assert said(median([0.1, 0.2, 0.3])) == "0.2 [0.1 to 0.3] (0.1 to 0.3), 3 samples"


@pytest.mark.parametrize("summary", [median, lambda a: paired(a, a), lambda a: totals(a, a)])
@pytest.mark.parametrize("samples", [[], [1.0]])
def test_one_sample_is_refused(summary: object, samples: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"two samples or more, got {len(samples)}"):
        summary(samples)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_values_that_make_no_ratio_are_refused(bad: float) -> None:
    for pair in (([1.0, bad], [1.0, 1.0]), ([1.0, 1.0], [1.0, bad])):
        with pytest.raises(ValueError, match="positive, finite"):
            paired(*pair)


@pytest.mark.parametrize("summary", [paired, totals])
def test_unequal_lists_are_refused(summary: object) -> None:
    with pytest.raises(ValueError, match="got 2 and 3 values"):
        summary([1.0, 1.0], [1.0, 1.0, 1.0])


def test_totals_are_ratios_of_sums_over_items() -> None:
    found = totals([2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1])
    assert (found.value, found.low, found.high, found.smallest) == (2.0, 2.0, 2.0, None)
    found = totals([5, 0, 1, 0, 3, 0], [4, 0, 1, 1, 2, 1])
    assert found.value == 1.0
    assert found.low < 1.0 < found.high
    assert found.difference == "no difference seen"
    assert totals([3, 4], [0, 0]).value == 7.0


def test_the_same_samples_give_the_same_interval() -> None:
    assert paired(*noisy(1.3, 50, 3)) == paired(*noisy(1.3, 50, 3))


def test_json_has_the_spread_beside_the_name_and_the_page_the_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Namespace(quick=True, json=tmp_path / "figures.json")
    figures: dict[str, float | Ratio] = {
        "speed": paired([1.0, 2.0] * 4, [2.0, 1.0] * 4),
        "read": totals([3, 2], [2, 2]),
        "plans": 75,
    }
    publish("none", "Title", ("", "a"), [("row", "1")], figures, options=options, packages="")
    flat = json.loads(options.json.read_text())
    assert set(flat) == {
        "speed", "speed_low", "speed_high", "speed_min", "speed_max", "speed_samples", "read", "read_low", "read_high", "read_samples", "plans",
    }  # fmt: skip
    assert (flat["speed"], flat["speed_min"], flat["speed_max"], flat["speed_samples"]) == (1.25, 0.5, 2.0, 8)
    assert flat["plans"] == 75
    page = capsys.readouterr().out
    assert "`speed` = 1.25 [0.5 to 2] (0.5 to 2), 8 samples, no difference seen" in page
    assert "`plans` = 75\n" in page
    assert not (Path(__file__).parents[2] / "benchmarks" / "none.md").exists()
