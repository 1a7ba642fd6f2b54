"""Noise of the right size where it belongs, and its price against closed forms and the library asked directly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from scipy import special, stats

from arclight import recipe
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.fold import Fold
from arclight.federated.coordination.settings import Sampling, Waiting
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.noise import (
    Budget,
    BudgetError,
    Ledger,
    Release,
    clip_and_add_noise,
    noise_for_clients,
    noisy_fold,
    privacy_budget,
    spent_before,
)
from arclight.federated.privacy.random_stream import add_random_words, random_normals, random_words
from arclight.federated.privacy.settings import Noise
from arclight.federated.settings import Federation

SECRET = bytes(range(32))


def clients(count: int, elements: int = 40_000, size: float = 1.0) -> list[Contribution]:
    draw = torch.Generator().manual_seed(count)
    return [
        Contribution(
            client=f"c{k}",
            weight=1,
            tensors={"model/a": size * torch.randn(elements, generator=draw), "model/n": torch.tensor(-3 - k)},
        )
        for k in range(count)
    ]


def test_the_key_stream_is_that_of_the_standard() -> None:
    """RFC 8439, appendix A.1, test vector 1: key and nonce zero."""
    from unittest.mock import patch

    with patch("arclight.federated.privacy.random_stream.hashlib.sha256") as hashed:
        hashed.return_value.digest.return_value = bytes(32)
        first = next(random_words(bytes(32), "")).tobytes()[:16]
    assert first.hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_streams_differ_by_secret_and_label_and_adding_is_undone() -> None:
    drawn = {next(random_words(key, label))[:4].tobytes() for key in (SECRET, bytes(32)) for label in ("a", "b")}
    assert len(drawn) == 4
    sums = torch.arange(100_000)
    add_random_words(SECRET, "x", sums)
    assert not torch.equal(sums, torch.arange(100_000))
    add_random_words(SECRET, "x", sums, -1)
    assert torch.equal(sums, torch.arange(100_000))


def test_normals_are_normal() -> None:
    source = random_normals(SECRET, "x")
    drawn = np.concatenate([next(source).numpy() for _ in range(8)])
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    assert 4 < np.abs(drawn).max() < 7


@pytest.mark.parametrize("count", [1, 5])
def test_the_mean_gets_noise_of_the_size_asked_for(count: int) -> None:
    settings, given = Noise(clip=2.0, multiplier=0.5), clients(count)
    mean = dict(noisy_fold(settings, SECRET)(given))
    short = [
        Contribution(
            client=one.client,
            weight=1,
            tensors={"model/a": one.tensors["model/a"] * 2.0 / one.tensors["model/a"].norm()},
        )
        for one in given
    ]
    left = (mean["model/a"] - dict(Fold(short))["model/a"]).double().numpy() * count / (2.0 * 0.5)
    assert stats.kstest(left, "norm").pvalue > 1e-3
    assert mean["model/n"].item() == -2 - count, "counters get no noise"
    again = dict(noisy_fold(settings, SECRET)(given))
    assert torch.equal(again["model/a"], mean["model/a"])
    fresh = dict(noisy_fold(settings)(given))
    assert not torch.equal(fresh["model/a"], mean["model/a"])


def test_a_client_moves_the_mean_by_no_more_than_its_part_of_the_clip() -> None:
    settings, given = Noise(clip=1.0, multiplier=1e-9), clients(4)
    loud = Contribution(
        client="c3", weight=1, tensors={"model/a": torch.full((40_000,), 1e9), "model/n": torch.tensor(0)}
    )
    one = dict(noisy_fold(settings, SECRET)(given))["model/a"]
    other = dict(noisy_fold(settings, SECRET)([*given[:3], loud]))["model/a"]
    assert (one - other).double().norm().item() <= 2 * 1.0 / 4 * (1 + 1e-6)


def test_clients_parts_make_the_noise_of_the_settings() -> None:
    settings = Noise(clip=3.0, multiplier=0.7, by="clients")
    federation = Federation(clients=6, noise=settings, weigh_by="equal", waiting=Waiting(quorum=1.0))
    given, asked = clients(6), noise_for_clients(federation)["noise"]
    sent = [
        Contribution(
            client=one.client, weight=1, tensors=dict(clip_and_add_noise(one.tensors.items, asked, bytes([k]) * 32))
        )
        for k, one in enumerate(given)
    ]
    mean = dict(noisy_fold(settings)(sent))["model/a"].double()
    exact = sum(one.tensors["model/a"].double() * 3.0 / one.tensors["model/a"].double().norm() for one in given) / 6
    assert stats.kstest(((mean - exact) * 6 / (0.7 * 3.0)).numpy(), "norm").pvalue > 1e-3
    quiet = {**asked, "multiplier": 1e-12}
    short = dict(clip_and_add_noise({"model/a": torch.full((4,), 0.5)}.items, quiet))
    assert short["model/a"].tolist() == [0.5] * 4, "short changes stay as they are"
    assert noise_for_clients(Federation(noise=Noise(clip=1, multiplier=1), weigh_by="equal")) == {}
    early = Federation(clients=10, noise=settings, weigh_by="equal", waiting=Waiting(quorum=0.75))
    assert noise_for_clients(early)["noise"]["least"] == 8


def exact_epsilon(sigma: float, delta: float) -> float:
    """Of the Gaussian mechanism (Balle and Wang 2018, theorem 8), by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        e = (low + high) / 2
        with np.errstate(over="ignore"):
            log_second = e + special.log_ndtr(-1 / (2 * sigma) - e * sigma)
        lost = special.ndtr(1 / (2 * sigma) - e * sigma) - math.exp(log_second)
        low, high = (e, high) if lost > delta else (low, e)
    return high


@pytest.mark.parametrize("multiplier", [1.0, 4.0])
@pytest.mark.parametrize("rounds", [1, 10, 100])
def test_epsilon_bounds_the_exact_one_closely(multiplier: float, rounds: int) -> None:
    told = Budget(noise=Noise(clip=1, multiplier=multiplier), clients=10, per_round=10).epsilon(rounds)
    exact = exact_epsilon(multiplier / math.sqrt(rounds), 1e-5)
    assert exact <= told <= 1.25 * exact + 0.1


def test_drawing_clients_by_chance_is_counted_only_where_it_is_by_chance() -> None:
    noise = Noise(clip=1, multiplier=4.0)
    drawn = Budget(noise=noise, clients=10_000, per_round=50).epsilon(100)
    library = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(10_000, 50, dp_accounting.GaussianDpEvent(2.0))
    library.compose(event, 100)
    assert drawn == pytest.approx(library.get_epsilon(1e-5))
    always = Budget(noise=noise, clients=10_000, per_round=50, by_chance=False).epsilon(100)
    assert always == Budget(noise=noise, clients=50, per_round=50).epsilon(100)
    assert drawn < 0.2 * always


def test_a_budget_is_not_overdrawn() -> None:
    noise = Noise(clip=1, multiplier=2.0, epsilon=8.0)
    privacy_budget = Budget(noise=noise, clients=10, per_round=10)
    paid = privacy_budget.rounds(500)
    assert privacy_budget.epsilon(paid) <= 8.0 < privacy_budget.epsilon(paid + 1)
    privacy_budget.check(paid)
    with pytest.raises(BudgetError, match=rf"{paid + 1} rounds would spend .* it pays for {paid} rounds"):
        privacy_budget.check(paid + 1)
    assert Budget(noise=Noise(clip=1, multiplier=1.0), clients=2, per_round=2).rounds(7) == 7
    assert privacy_budget.epsilon(0) == 0


def test_a_federation_counts_noise_by_its_sampling() -> None:
    noise = Noise(clip=1, multiplier=1)
    drawn = Federation(
        clients=20, noise=noise, weigh_by="equal", sampling=Sampling(per_round=5), waiting=Waiting(quorum=1.0)
    )
    assert privacy_budget(drawn, 20) == Budget(noise=noise, clients=20, per_round=5)
    first = Federation(clients=20, noise=noise, weigh_by="equal", sampling=Sampling(per_round=5, over_provision=0.5))
    assert privacy_budget(first, 20) == Budget(noise=noise, clients=20, per_round=5, by_chance=False)
    assert privacy_budget(Federation(), 4) is None
    for table, said in (
        ({"send": "weights"}, "send"),
        ({"weigh_by": "samples"}, "weigh_by"),
        ({"moments": ["exp_avg"]}, "moments"),
        ({"robust": "median"}, "robust"),
        ({"noise": {"clip": 1, "multiplier": 1, "by": "clients"}, "up": "int8"}, "up"),
    ):
        with pytest.raises(recipe.RecipeError, match=said):
            recipe.read(Federation, {"noise": {"clip": 1, "multiplier": 1}, "weigh_by": "equal", **table})


def test_noise_refuses_unbounded_updates_and_invalid_settings() -> None:
    make, given = noisy_fold(Noise(clip=1, multiplier=1)), clients(2)
    uneven = [*given, Contribution(client="z", weight=2, tensors=given[0].tensors)]
    moments = [Contribution(client="z", weight=1, tensors={"exp_avg/a": torch.zeros(3)})]
    cases: list[tuple[Any, str, str]] = [
        (given, "weights", "send"),
        (uneven, "delta", "weigh_by"),
        (moments, "delta", "exp_avg/a"),
    ]
    for what, form, said in cases:
        with pytest.raises(FederatedError, match=said):
            make(what, form)
    for bad in ({"clip": 0}, {"multiplier": 0}, {"delta": 1.0}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: need "):
            Noise(**{"clip": 1.0, "multiplier": 1.0, **bad})
    with pytest.raises(ValueError, match=r"noise is added by .*, got 'nobody'"):
        Noise(clip=1.0, multiplier=1.0, by="nobody")  # type: ignore[arg-type]


def test_noise_of_the_clients_is_not_added_again_by_the_server() -> None:
    given = clients(3)
    quiet = dict(noisy_fold(Noise(clip=1e9, multiplier=1.0, by="clients"), SECRET)(given))
    assert torch.equal(quiet["model/a"], dict(Fold(given))["model/a"])


def test_a_round_that_spends_the_whole_budget_is_published() -> None:
    ledger = Ledger({Release(multiplier=1.0): 1})
    spent = ledger.epsilon(1e-5)
    settings = Noise(clip=1.0, multiplier=1.0, delta=1e-5, epsilon=spent)
    assert Budget(noise=settings, clients=4, per_round=4).exceeded(ledger) is None
    less = replace(settings, epsilon=spent * (1 - 1e-9))
    assert "it would spend epsilon" in str(Budget(noise=less, clients=4, per_round=4).exceeded(ledger))
    assert Budget(noise=replace(settings, epsilon=None), clients=4, per_round=4).exceeded(ledger) is None


def test_older_checkpoints_count_each_round_with_the_least_noise_it_can_have_had() -> None:
    def before(number: int, **noise: Any) -> dict[Release, int]:
        waiting, sampling = {"quorum": 0.5}, {"per_round": 18}
        said = {"noise": noise or None, "waiting": waiting, "sampling": sampling, "clients": 100}
        return dict(spent_before({"federation": {"settings": said}}, number).releases)

    assert before(3, by="server", multiplier=2.0) == {Release(multiplier=2.0): 3}
    assert before(1, by="server", multiplier=2.0) == {Release(multiplier=2.0): 1}
    assert before(3, by="clients", multiplier=2.0) == {Release(multiplier=2.0 / 3): 3}
    assert before(0, by="server", multiplier=2.0) == before(3) == {}
    said = [{"multiplier": 1.5, "clients": 8, "drawn": 2, "rounds": 4}]
    assert dict(spent_before({"privacy": said}, 9).releases) == {Release(multiplier=1.5, clients=8, drawn=2): 4}


def test_a_variance_that_noise_would_take_below_zero_stays_as_it_was() -> None:
    change = {"model/bn.running_var": torch.full((64,), 0.01), "model/bn.weight": torch.full((64,), 0.01)}
    given = [Contribution(client=name, weight=1, tensors=change) for name in "ab"]
    settings = Noise(clip=1e6, multiplier=1e-6)
    plain = dict(noisy_fold(settings, SECRET)(given))
    former = {key: torch.full((64,), 0.5) for key in change}
    clamped = dict(noisy_fold(settings, SECRET, former.__getitem__)(given))
    beyond = plain["model/bn.running_var"] > 0.5
    assert 0 < int(beyond.sum()) < 64
    assert torch.equal(clamped["model/bn.running_var"], plain["model/bn.running_var"].masked_fill(beyond, 0.0))
    assert torch.equal(clamped["model/bn.weight"], plain["model/bn.weight"])
    exact = dict(noisy_fold(Noise(clip=1e6, multiplier=1e-6, by="clients"), SECRET, former.__getitem__)(given))
    assert torch.allclose(exact["model/bn.running_var"], change["model/bn.running_var"])


def test_counters_get_no_noise_however_much_there_is() -> None:
    given = clients(2)
    mean = dict(noisy_fold(Noise(clip=1.0, multiplier=1e6), SECRET)(given))
    assert mean["model/n"].item() == -4
    assert mean["model/a"].abs().max() > 1e3
