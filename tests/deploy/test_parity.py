"""Distances between outputs, the bounds that judge them, and the sentences that show them."""

from __future__ import annotations

import math

import pytest
import torch

from arclight.deploy.parity import (
    FLOAT_TOLERANCE,
    INT8_SQNR_DB,
    LISTED,
    ROUNDED_INTEGERS,
    Distance,
    Parity,
    broken_bound,
    compare,
    parity_summary,
    speed_summary,
    to_json,
    worst,
)


def parity(difference: float = 0.0, largest: float = 1.0, sqnr_db: float = math.inf) -> Parity:
    return Parity(max_difference=difference, largest=largest, sqnr_db=sqnr_db)


def test_float_programs_are_bound_by_a_share_of_their_largest_value() -> None:
    largest = 50.0
    allowed = FLOAT_TOLERANCE * largest
    assert broken_bound(parity(allowed, largest, sqnr_db=-20.0), "fp32") is None
    assert broken_bound(parity(allowed * 1.01, largest), "fp32") == "1e-04 of its largest value is 0.005"


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_rounded_programs_are_bound_by_their_noise(precision: str) -> None:
    assert broken_bound(parity(9.0, sqnr_db=INT8_SQNR_DB), precision) is None
    assert broken_bound(parity(9.0, sqnr_db=INT8_SQNR_DB - 0.1), precision) == f"{precision} programs need 30 dB"


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bound_that_is_given_comes_before_those_of_a_precision(precision: str) -> None:
    assert broken_bound(parity(0.5, sqnr_db=-20.0), precision, max_difference=0.5) is None
    assert broken_bound(parity(0.51), precision, max_difference=0.5) == "max_difference is 0.5"


def test_distances_of_samples_add_up_to_those_of_all() -> None:
    wanted, given = torch.tensor([[3.0, -4.0], [0.0, 12.0]]), torch.tensor([[3.0, -4.5], [0.25, 12.0]])
    whole = compare([wanted], [given])["0"]
    assert (whole.max_difference, whole.largest) == (0.5, 12.0)
    assert whole.sqnr_db == pytest.approx(10 * math.log10((9 + 16 + 144) / (0.25 + 0.0625)))
    halves = (
        Distance(max_difference=0.5, largest=4.0, signal=25.0, noise=0.25),
        Distance(max_difference=0.25, largest=12.0, signal=144.0, noise=0.0625),
    )
    assert (halves[0] + halves[1]).parity == whole
    assert worst([parity(0.1, 2.0, 40.0), parity(0.2, 1.0, 50.0)]) == parity(0.2, 2.0, 40.0)


@pytest.mark.parametrize(
    ("values", "kind"), [([1.0, math.nan], "NaN in 1 of 2"), ([math.inf, -math.inf], "infinite in 2 of 2")]
)
def test_references_that_tell_nothing_are_refused(values: list[float], kind: str) -> None:
    with pytest.raises(ValueError, match=f"output 0 of the reference is {kind} values"):
        compare([torch.tensor(values)], [torch.zeros(2)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_must_be_equal_with_any_bound(dtype: torch.dtype) -> None:
    wanted = torch.tensor([1, 0, 120, 1]).to(dtype)
    given = wanted.clone()
    given[1] = 1
    assert broken_bound(compare([wanted], [wanted])["0"], "fp32") is None
    found = compare([wanted], [given])["0"]
    assert (found.integers, found.differing, found.difference) == (4, 1, "in 1 of 4 elements, by up to 1")
    for bound in (None, 50.0):
        assert broken_bound(found, "fp32", bound) == "integers must be equal"
    assert to_json(found).items() >= {"integers": 4, "differing": 1}.items()


@pytest.mark.parametrize("ids", [(50_000, 50_001), (2**53, 2**53 + 1), (-(2**63), 2**63 - 1)])
def test_large_ids_that_differ_are_seen(ids: tuple[int, int]) -> None:
    """As values they differ by less than a share of the largest, beyond 2 ** 53 by nothing in float64."""
    found = compare([torch.tensor([ids[0], ids[0]])], [torch.tensor([ids[0], ids[1]])])["0"]
    assert (found.integers, found.differing) == (2, 1)
    assert found.max_difference > 0
    assert broken_bound(found, "fp32") == "integers must be equal"


def test_rounded_programs_may_decide_ties_otherwise() -> None:
    allowed = Distance(integers=1000, differing=round(1000 * ROUNDED_INTEGERS))
    assert broken_bound(allowed.parity, "int8") is None
    more = worst([allowed.parity, Distance(integers=1, differing=1).parity])
    assert (more.integers, more.differing) == (1001, allowed.differing + 1)
    for bound in (None, 50.0):
        assert broken_bound(more, "int8", bound) == "int8 programs may differ in 1% of their integers"


@pytest.mark.parametrize("labels", [1, 1000])
def test_the_ratio_of_integers_counts_those_that_differ(labels: int) -> None:
    """By how much a class id differs means nothing."""
    reference = torch.zeros(100, dtype=torch.int64)
    reference[:50] = labels
    output = reference.clone()
    output[0] = 0
    assert compare([reference], [output])["0"].sqnr_db == pytest.approx(20.0)


def test_ratios_without_a_number_are_written_as_json() -> None:
    assert to_json(parity())["sqnr_db"] is None
    assert to_json(parity(1.0, 0.0, -math.inf))["sqnr_db"] == -999.0
    assert to_json(parity(0.5, 2.0, 12.0)) == {"max_difference": 0.5, "largest": 2.0, "sqnr_db": 12.0}


def test_summaries_say_how_close_each_output_is() -> None:
    assert parity_summary({"parity": to_json(parity())}) == "agrees with its torch model to every bit"
    outputs = {f"out{place}": to_json(parity(0.25, 4.0, 41.0)) for place in range(LISTED)}
    metadata = {"parity": {"sqnr_db": 41.4, "outputs": outputs}}
    each = ", ".join(f"out{place} differ by up to 0.25 of 4" for place in range(LISTED))
    assert parity_summary(metadata) == f"agrees with its torch model to 41 dB ({each})"
    counted = {"parity": {"sqnr_db": 41.4, "outputs": {"ids": to_json(Parity(
        max_difference=7, largest=9, sqnr_db=41.0, integers=160, differing=3
    ))}}}  # fmt: skip
    assert parity_summary(counted) == "agrees with its torch model to 41 dB (ids differ in 3 of 160 integers)"
    metadata["parity"]["outputs"] |= {"x": outputs["out0"], "y": outputs["out0"]}
    assert parity_summary(metadata) == f"agrees with its torch model to 41 dB ({each}, 2 more outputs)"


def test_summaries_say_how_fast_a_quantized_program_is() -> None:
    speed = {"over_fp32": 2.345, "low": 2.1, "high": 2.5, "size_over_fp32": 0.27}
    assert speed_summary({}) == speed_summary({"quantization": {}}) == ""
    assert speed_summary({"quantization": {"speed": speed}}) == (
        ", 2.35 x as fast as float32 (2.10-2.50, one sample, one thread) in 27% of its size"
    )
