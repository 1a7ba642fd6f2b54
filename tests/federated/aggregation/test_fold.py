"""The fold against exact rational arithmetic, and its promise that order, threads and splits leave no trace."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.checkpoint import save
from arclight.checkpoint.sharded.reader import open_state
from arclight.federated.aggregation import fold
from arclight.federated.aggregation.fixed_point import Contribution, measure, plan
from arclight.federated.aggregation.fold import Fold
from arclight.federated.errors import FederatedError, RefusedError

SIZES = {"model/large": (3, 70_001), "model/vector": (257,), "model/scalar": (), "model/empty": (0, 4)}


def some(client: str, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Contribution:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, shape in SIZES.items():
        sizes = torch.exp(spread * torch.randn(shape, generator=draw, dtype=torch.float64))
        tensors[key] = (torch.randn(shape, generator=draw, dtype=torch.float64) * sizes).to(dtype)
    return Contribution(client=client, weight=0.1 + 0.7 * seed, tensors=tensors)


def bits(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def exact(values: Sequence[float], weights: Sequence[float]) -> Fraction:
    return sum((Fraction(x) * Fraction(w) for x, w in zip(values, weights, strict=True)), Fraction(0)) / sum(
        map(Fraction, weights), Fraction(0)
    )


@pytest.mark.parametrize("form", ["delta", pytest.param("weights", marks=pytest.mark.slow)])
def test_every_order_and_thread_count_has_the_same_bits(form: str) -> None:
    clients = [some(name, seed, spread=4.0) for seed, name in enumerate("abcd")]
    seen, told = set(), set()
    for number, order in enumerate(itertools.permutations(clients)):
        folding = Fold(order, form, threads=1 + number % 3)
        seen.add(bits(dict(folding)))
        told.add(repr(folding.statistics))
    assert len(seen) == 1
    assert len(told) == 1, "statistics are written to the journal: they too must not depend on order or threads"


def test_the_mean_is_closer_to_the_exact_one_than_a_running_mean_in_float32() -> None:
    clients = [some(name, seed) for seed, name in enumerate("abcdefgh")]
    mean = dict(Fold(clients))["model/vector"]
    weights = [one.weight for one in clients]
    running, so_far = torch.zeros(257), 0.0
    for one in clients:
        running = running * (so_far / (so_far + one.weight)) + one.tensors["model/vector"] * (
            one.weight / (so_far + one.weight)
        )
        so_far += one.weight
    ours = theirs = Fraction(0)
    for place in range(257):
        true = exact([one.tensors["model/vector"][place].item() for one in clients], weights)
        assert mean[place].item() == float(torch.tensor(float(true), dtype=torch.float32)), "rounded once"
        ours = max(ours, abs(Fraction(mean[place].item()) - true))
        theirs = max(theirs, abs(Fraction(running[place].item()) - true))
    assert 2 * ours < theirs


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
extreme = st.one_of(
    finite, st.sampled_from(torch.tensor([0.0, -0.0, 1e-45, -1e-38, 1e30, -1e30, 1e-30, 3.4e38]).tolist())
)


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_no_value_is_off_by_more_than_the_fixed_point_allows(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(st.data())(check_a_fold_of_extremes))()


def check_a_fold_of_extremes(data: st.DataObject) -> None:
    count, length = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 6))
    weights = [data.draw(st.one_of(st.integers(1, 10**9), st.floats(1e-3, 1e6))) for _ in range(count)]
    rows = [data.draw(st.lists(extreme, min_size=length, max_size=length)) for _ in range(count)]
    clients = [
        Contribution(client=str(k), weight=float(w), tensors={"model/x": torch.tensor(row)})
        for k, (w, row) in enumerate(zip(weights, rows, strict=True))
    ]
    mean = dict(Fold(clients))["model/x"]
    peak = max(abs(x) for row in rows for x in row)
    for place in range(length):
        true = exact([row[place] for row in rows], [float(w) for w in weights])
        rounding = abs(true) * Fraction(2) ** -24 + Fraction(2) ** -150
        assert (
            abs(Fraction(mean[place].item()) - true)
            <= rounding * Fraction(101, 100) + count * Fraction(peak) * Fraction(2) ** -52
        )


@pytest.mark.parametrize("value", [1.7e308, 1e-280, 1e-200, 2.0**1000])
def test_float64_does_not_overflow_at_either_end(value: float) -> None:
    sent = torch.tensor([value, -value, 0.0], dtype=torch.float64)
    clients = [Contribution(client=name, weight=10.0**9, tensors={"model/x": sent}) for name in "ab"]
    folding = Fold(clients)
    mean = dict(folding)["model/x"]
    assert mean.dtype is torch.float64
    assert torch.allclose(mean, sent, rtol=1e-15, atol=0)
    assert math.isfinite(folding.statistics.norm)


def test_the_sum_of_weights_depends_on_no_order() -> None:
    found = {
        plan([Contribution(client=str(w), weight=w, largest={"model/x": 1.0}) for w in order])["model/x"]
        for order in itertools.permutations([1e16, 1.0, 1.5, 3.0])
    }
    assert len(found) == 1
    assert found.pop().total == 1e16 + 6


@pytest.mark.parametrize("size", [1 - 2.0**-24, 1.0, 3.4028234663852886e38, 1e-44])
def test_the_largest_sum_that_can_be_does_not_overflow(size: float) -> None:
    """All clients have the same sign and the largest value; their weights sum to just below a power of two."""
    value = torch.tensor([size, -size])
    clients = [Contribution(client=str(k), weight=2.0**20 - 2.0**-20, tensors={"model/x": value}) for k in range(64)]
    assert torch.equal(dict(Fold(clients))["model/x"], value)


@settings(max_examples=60, deadline=None)
@given(st.lists(extreme, max_size=8), st.floats(1e-6, 1e12), st.sampled_from(["delta", "weights"]))
def test_a_single_contributor_comes_out_as_it_is(values: list[float], weight: float, form: str) -> None:
    sent = {"model/x": torch.tensor(values), "model/half": torch.tensor(values).to(torch.bfloat16)}
    whole = bool(torch.isfinite(sent["model/half"]).all())
    alone = Contribution(client="a", weight=weight, tensors=sent if whole else {"model/x": sent["model/x"]})
    mean = dict(Fold([alone], form))
    assert bits({"x": mean["model/x"]}) == bits({"x": sent["model/x"]})
    if whole:
        assert bits({"x": mean["model/half"]}) == bits({"x": sent["model/half"].float()})


def test_a_key_is_averaged_over_those_who_have_it() -> None:
    one, two = torch.full((4,), 1.0), torch.full((4,), 5.0)
    clients = [
        Contribution(client="a", weight=1, tensors={"model/shared": one, "model/expert.0": one}),
        Contribution(client="b", weight=3, tensors={"model/shared": two, "model/expert.1": two}),
        Contribution(client="c", weight=4, tensors={"model/expert.1": one}),
    ]
    mean = dict(Fold(clients))
    assert mean["model/shared"].tolist() == [4.0] * 4
    assert mean["model/expert.0"].tolist() == [1.0] * 4
    assert mean["model/expert.1"].tolist() == pytest.approx([(3 * 5 + 4) / 7] * 4)


def test_integers_take_the_client_that_counted_furthest() -> None:
    counts = [torch.tensor(7), torch.tensor(12), torch.tensor(9)]
    key = "model/norm.num_batches_tracked"
    after = [Contribution(client=str(k), weight=1, tensors={key: count}) for k, count in enumerate(counts)]
    change = [Contribution(client=str(k), weight=1, tensors={key: 5 - count}) for k, count in enumerate(counts)]
    (most,) = dict(Fold(after, "weights")).values()
    (least,) = dict(Fold(change)).values()
    assert (most.item(), 5 - least.item(), most.dtype, most.shape) == (12, 12, torch.int64, torch.Size([]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_changes_of_counters_give_the_counters_that_weights_give(dtype: torch.dtype) -> None:
    """One client has not counted: of bytes without a sign its change, 0, is smaller than what 0 - 3 wraps around to."""
    before = torch.tensor([0, 10, 100], dtype=dtype)
    after = {"a": before, "b": torch.tensor([3, 12, 127], dtype=dtype)}
    for form in ("delta", "weights"):
        sent = {name: before - value if form == "delta" else value for name, value in after.items()}
        given = [Contribution(client=name, weight=1, tensors={"model/n": value}) for name, value in sent.items()]
        ((_, value),) = Fold(given, form)  # type: ignore[arg-type]
        assert torch.equal(before - value if form == "delta" else value, after["b"]), form
        assert value.dtype == dtype


def test_weights_and_their_changes_tell_the_same_statistics() -> None:
    before = {key: torch.randn(shape, generator=torch.Generator().manual_seed(9)) for key, shape in SIZES.items()}
    changes = [some(name, seed) for seed, name in enumerate("abc")]
    after = [
        Contribution(
            client=one.client,
            weight=one.weight,
            tensors={key: (before[key].double() - change.double()) for key, change in one.tensors.items()},
        )
        for one in changes
    ]
    by_change, by_weights = Fold(changes), Fold(after, "weights", anchor=before)
    dict(by_change), dict(by_weights)
    first, second = by_change.statistics, by_weights.statistics
    assert first.norm == pytest.approx(second.norm, rel=1e-6)
    assert first.norms == pytest.approx(second.norms, rel=1e-9)
    assert first.cosines == pytest.approx(second.cosines, rel=1e-6)


def test_statistics_are_those_of_a_plain_computation() -> None:
    clients = [some(name, seed) for seed, name in enumerate("abc")]
    folding = Fold(clients, threads=2)
    dict(folding)
    told = folding.statistics
    rows = {one.client: torch.cat([one.tensors[key].double().reshape(-1) for key in SIZES]) for one in clients}
    weight = sum(one.weight for one in clients)
    mean = {key: sum(one.weight * one.tensors[key].double() for one in clients) / weight for key in SIZES}
    common = torch.cat([mean[key].reshape(-1) for key in SIZES])
    for client, row in rows.items():
        assert told.norms[client] == pytest.approx(row.norm().item(), rel=1e-12)
        assert told.cosines[client] == pytest.approx((row @ common / row.norm() / common.norm()).item(), rel=1e-9)
    assert told.norm == pytest.approx(common.norm().item(), rel=1e-12)
    assert told.norm_by_key["model/vector"] == pytest.approx(mean["model/vector"].norm().item(), rel=1e-12)
    assert measure("a", clients[0].tensors).norm() == pytest.approx(told.norms["a"], rel=1e-12)


def test_the_noise_scale_is_found_from_gradients_of_known_noise() -> None:
    draw = torch.Generator().manual_seed(1)
    gradient, sigma, found = torch.full((4096,), 0.05), 1.0, []
    for _ in range(30):
        clients = [
            Contribution(
                client=str(k),
                weight=float(b),
                tensors={"model/x": gradient + sigma * torch.randn(4096, generator=draw) / math.sqrt(b)},
            )
            for k, b in enumerate((64, 128, 256))
        ]
        folding = Fold(clients, cosines=False)
        dict(folding)
        assert folding.statistics.noise_scale is not None
        found.append(folding.statistics.noise_scale)
    assert sum(found) / len(found) == pytest.approx(sigma**2 / 0.05**2, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("measured", [True, False])
def test_a_value_that_is_not_finite_is_refused_by_name(bad: float, measured: bool) -> None:
    broken = torch.zeros(100_000)
    broken[77_777] = bad
    clients = [
        Contribution(
            client=name,
            weight=1,
            tensors={"model/w": tensor},
            largest={"model/w": 1.0} if measured else None,
        )
        for name, tensor in (("good", torch.ones(100_000)), ("ill", broken))
    ]
    with pytest.raises(RefusedError, match="ill sent model/w") as refused:
        dict(Fold(clients, threads=2))
    assert refused.value.reason == "not_finite"


def test_values_that_are_not_finite_are_found_by_measuring() -> None:
    with pytest.raises(RefusedError, match="ill sent model/w"):
        measure("ill", {"model/w": torch.tensor([1.0, math.nan])})


@pytest.mark.parametrize("order", [1, -1])
def test_a_mean_is_float64_if_one_contributor_is(order: int) -> None:
    sent = torch.tensor([1 + 2.0**-40, -3.0], dtype=torch.float64)
    clients = [
        Contribution(client="a", weight=1, tensors={"model/x": sent.float()}),
        Contribution(client="b", weight=1, tensors={"model/x": sent}),
    ][::order]
    mean = dict(Fold(clients))["model/x"]
    assert mean.dtype is torch.float64
    assert mean.tolist() == [1 + 2.0**-41, -3.0]


def test_a_single_contributor_that_is_scaled_does_not_come_out_as_it_is() -> None:
    sent = torch.tensor([1.0, -3.0])
    mean = dict(Fold([Contribution(client="a", weight=2, tensors={"model/x": sent}, scale=0.25)]))
    assert mean["model/x"].tolist() == [0.25, -0.75]


def test_a_client_whose_change_is_zero_has_no_cosine() -> None:
    sent = {"a": torch.ones(3), "b": torch.zeros(3)}
    folding = Fold([Contribution(client=name, weight=1, tensors={"model/x": x}) for name, x in sent.items()])
    dict(folding)
    assert folding.statistics.cosines == {"a": pytest.approx(1.0)}


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_that_are_read_from_files_give_the_same_bits(tmp_path: Path, threads: int) -> None:
    clients = [some(name, seed) for seed, name in enumerate("abc")]
    clients.append(some("d", 4, dtype=torch.bfloat16))
    stored = []
    for one in clients:
        names = {key.removeprefix("model/"): tensor for key, tensor in one.tensors.items()}
        opened = open_state(save(tmp_path / one.client, {"model": names}))["model"]
        stored.append(replace(one, tensors={f"model/{name}": tensor for name, tensor in opened.items()}))
    assert bits(dict(Fold(stored, threads=threads))) == bits(dict(Fold(clients)))


def test_a_fold_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread is needed, got 0"):
        dict(Fold([some("a", 1)], threads=0))


def test_invalid_contributions_are_refused() -> None:
    one = Contribution(client="a", weight=1, tensors={"model/x": torch.ones(3)})
    with pytest.raises(FederatedError, match="no contribution"):
        Fold([])
    with pytest.raises(FederatedError, match="a contributes twice"):
        Fold([one, one])
    with pytest.raises(RefusedError, match="weighs 0"):
        Fold([Contribution(client="b", weight=0, tensors=one.tensors)])
    with pytest.raises(RefusedError, match=r"b has model/x of \(4,\), a of \(3,\)"):
        dict(Fold([one, Contribution(client="b", weight=1, tensors={"model/x": torch.ones(4)})]))
    with pytest.raises(FederatedError, match="integers"):
        Fold([one, Contribution(client="b", weight=1, tensors={"model/x": torch.ones(3, dtype=torch.int64)})])
    with pytest.raises(RefusedError, match="complex"):
        dict(Fold([Contribution(client="b", weight=1, tensors={"model/x": torch.ones(3, dtype=torch.complex64)})]))
    lying = [Contribution(client=c, weight=1, tensors=one.tensors, largest={"model/x": 1e-9}) for c in "ab"]
    with pytest.raises(FederatedError, match="measure it again"):
        dict(Fold(lying))


def even(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Values between -1 and 1 from integer arithmetic alone: the same bits everywhere."""
    place = torch.arange(math.prod(shape), dtype=torch.int64)
    drawn = (place * 2654435761 + seed * 40503) % 2**32
    return ((drawn.double() - 2**31) / 2**31).reshape(shape).to(dtype)


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def several(count: int, form: str) -> list[Contribution]:
    tensors = [
        {key: even(shape, 7 * k + len(key), TYPES[len(key) % 4]) for key, shape in SIZES.items()} for k in range(count)
    ]
    for k, own in enumerate(tensors):
        own["model/faint"] = torch.full((40,), -1e-30) if k else torch.linspace(-1.0, 1.0, 40)
        own["model/nothing"] = torch.full((9,), -0.0)
        own["exp_avg/vector"] = own["model/vector"].float() * 1e-3
        own["model/steps"] = torch.tensor(3 + k % 2)
        if k % 3 == 1:
            del own["model/vector"]
    scale = 0.5 if form == "delta" else 1.0
    return [
        Contribution(client=f"c{k:02d}", weight=1.5 + k, tensors=own, scale=scale if k == 1 else 1.0)
        for k, own in enumerate(tensors)
    ]


@pytest.mark.parametrize(
    ("count", "form", "digest"),
    [
        (1, "delta", "8765ec9c20395169 959ba26c832c8c10"),
        (2, "delta", "2f810340a0d9baeb 92810944efdd4189"),
        (2, "weights", "bf22f8528d9f3255 ce5d6d6865e66d42"),
        (3, "weights", "40ce2a1acf73d576 1ca9c91403702d95"),
        (18, "delta", "367578f82410056b 3050bc03da2ee853"),
    ],
)
def test_contributors_that_are_gone_through_together_or_in_turn_come_to_the_digest_of_earlier_versions(
    monkeypatch: pytest.MonkeyPatch, count: int, form: Any, digest: str
) -> None:
    given = several(count, form)
    anchor = {key: even(shape, 99, torch.float32) for key, shape in SIZES.items()} if form == "weights" else None
    for together in (1, 99):
        monkeypatch.setattr(fold, "_AT_ONCE", together)
        monkeypatch.setattr(fold, "_HELD", together)
        for threads in (1, 3):
            folding = Fold(given, form, anchor=anchor, threads=threads)
            found = bits(dict(folding))
            said = hashlib.sha256(repr(folding.statistics).encode()).hexdigest()
            assert f"{found[:16]} {said[:16]}" == digest
