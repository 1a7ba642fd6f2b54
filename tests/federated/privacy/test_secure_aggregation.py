"""Secure sums: the bits of the plain sum for any dropouts above the threshold, nothing below it, and nothing of one client."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arclight.federated.aggregation.fixed_point import Contribution, Scale
from arclight.federated.aggregation.fold import mean_of
from arclight.federated.errors import FederatedError
from arclight.federated.privacy import key_agreement
from arclight.federated.privacy.key_agreement import Cohort, PublicKeys
from arclight.federated.privacy.secure_aggregation import (
    ENCRYPTED_SHARE_BYTES,
    MaskedSum,
    Participant,
    RevealedShares,
    Unmasking,
    fixed_point_shift,
    fixed_point_terms,
)
from arclight.federated.privacy.settings import SecureSum

SETTINGS = SecureSum()


class Round:
    """A round played through in one process, with clients leaving where the test says."""

    def __init__(self, names: list[str], partners: int | None = None, number: int = 1) -> None:
        self.people = {name: Participant(name) for name in names}
        self.keys: dict[str, PublicKeys] = {name: person.keys for name, person in self.people.items()}
        self.cohort = Cohort(run="run", number=number, clients=tuple(names), partners=partners)

    def share(self, leaving: set[str]) -> None:
        self.encrypted_shares = {
            name: person.share(self.cohort, self.keys) for name, person in self.people.items() if name not in leaving
        }

    def inbox(self, name: str) -> dict[str, bytes]:
        return {sender: sent[name] for sender, sent in self.encrypted_shares.items() if name in sent}

    def mask(self, values: dict[str, dict[str, torch.Tensor]], leaving: set[str]) -> None:
        self.masked = {
            name: dict(self.people[name].mask(self.inbox(name), values[name]))
            for name in self.encrypted_shares
            if name not in leaving
        }

    def reveal(self, silent: set[str]) -> Unmasking:
        end = MaskedSum(self.cohort, self.keys, self.encrypted_shares, self.masked)
        for name in self.masked:
            if name not in silent:
                end.add(self.people[name].reveal(self.masked))
        return end.open()


def values_of(names: list[str], elements: int = 50) -> dict[str, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(len(names))
    return {
        name: {
            "model/a": torch.randint(-(2**50), 2**50, (elements,), generator=draw),
            "model/b": torch.randint(-9, 9, (3, 2), generator=draw),
        }
        for name in names
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_sum_is_the_plain_one_with_any_dropouts_above_the_threshold(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    partners = data.draw(st.sampled_from([None, 2, 4, 6]))
    names = [f"c{k}" for k in range(count)]
    round_ = Round(names, partners)
    cohort, here = round_.cohort, set(names)

    def may_leave(among: set[str], staying: set[str]) -> set[str]:
        chosen = data.draw(st.sets(st.sampled_from(sorted(among)), max_size=2))
        left: set[str] = set()
        for name in sorted(chosen):
            rest = staying - left - {name}
            if rest and all(
                sum(h in rest for h in cohort.holders(other)) >= cohort.threshold_of(other) for other in names
            ):
                left.add(name)
        return left

    never_shared = may_leave(here, here)
    here -= never_shared
    never_sent = may_leave(here, here)
    here -= never_sent
    silent = may_leave(here, here)
    values = values_of(names)
    round_.share(never_shared)
    round_.mask(values, never_sent)
    opened = round_.reveal(silent)
    for key in ("model/a", "model/b"):
        sums = sum(masked[key] for masked in round_.masked.values())
        assert isinstance(sums, torch.Tensor)
        opened.remove(key, sums)
        assert torch.equal(sums, sum(values[name][key].reshape(-1) for name in here))


def test_a_secure_mean_has_the_bits_of_the_sum_of_rounded_terms() -> None:
    names, draw = ["a", "b", "c"], torch.Generator().manual_seed(4)
    given = [
        Contribution(client=name, weight=3.0 + k, tensors={"model/x": torch.randn(40_000, generator=draw)})
        for k, name in enumerate(names)
    ]
    shift = fixed_point_shift(SETTINGS, 3)
    made = {one.client: fixed_point_terms(one.tensors["model/x"], int(one.weight), shift, SETTINGS) for one in given}
    round_ = Round(names)
    round_.share(set())
    round_.mask({name: {"model/x": mine} for name, (mine, _) in made.items()}, set())
    sums = sum(masked["model/x"] for masked in round_.masked.values())
    assert isinstance(sums, torch.Tensor)
    round_.reveal(set()).remove("model/x", sums)
    scale = Scale(rule="mean", shift=shift, total=12.0)
    terms = (one.tensors["model/x"].double() * one.weight * 2.0**shift for one in given)  # exact in float64
    assert torch.equal(sums, sum(term.round().to(torch.int64) for term in terms))
    exact = sum(one.weight * one.tensors["model/x"].double() for one in given) / 12
    assert torch.allclose(mean_of(scale, sums, torch.float32, [40_000]).double(), exact, rtol=1e-6, atol=1e-9)
    assert all(cut == 0 for _, cut in made.values())


def test_one_masked_update_is_indistinguishable_from_noise() -> None:
    names = ["a", "b", "c"]
    values = {name: {"model/x": torch.full((50_000,), 7)} for name in names}
    round_ = Round(names)
    round_.share(set())
    round_.mask(values, set())
    for masked in round_.masked.values():
        drawn = masked["model/x"].numpy().view(np.uint8)
        assert stats.chisquare(np.bincount(drawn, minlength=256)).pvalue > 1e-5
        words = masked["model/x"].numpy().view(np.uint64)
        assert stats.kstest(words.astype(np.float64) / 2.0**64, "uniform").pvalue > 1e-5
        assert len(np.unique(words)) == len(words)
    two = round_.masked["a"]["model/x"] + round_.masked["b"]["model/x"]
    assert stats.chisquare(np.bincount(two.numpy().view(np.uint8), minlength=256)).pvalue > 1e-5


def test_below_the_threshold_nothing_is_opened() -> None:
    names = [f"c{k}" for k in range(6)]
    values = values_of(names)
    round_ = Round(names)
    assert round_.cohort.threshold_of("c0") == 5
    round_.share(set())
    round_.mask(values, {"c0", "c1"})
    with pytest.raises(FederatedError, match=r"cannot be opened: 4 of c0's cohort .* 5 are needed; 2 of 6 dropped out"):
        MaskedSum(round_.cohort, round_.keys, round_.encrypted_shares, round_.masked)
    with pytest.raises(FederatedError, match="it refuses"):
        round_.people["c2"].reveal(round_.masked)
    full = Round(names)
    full.share(set())
    full.mask(values, set())
    with pytest.raises(FederatedError, match=r"1 more parts of c0's secret are needed .* no message from: c1, c4"):
        full.reveal({"c1", "c4"})
    few = Round(names)
    few.share({"c1", "c2"})
    with pytest.raises(FederatedError, match="c0 has 3 partners left in round 1, 4 are needed"):
        few.mask(values, set())


def test_a_client_never_gives_both_secrets_of_another() -> None:
    names = [f"c{k}" for k in range(7)]
    round_ = Round(names)
    round_.share(set())
    round_.mask(values_of(names), set())
    first = round_.people["c0"].reveal(names)
    assert set(first.seeds) == set(names)
    assert not first.keys
    assert round_.people["c0"].reveal(names) == first
    with pytest.raises(FederatedError, match="asked twice"):
        round_.people["c0"].reveal(names[:-1])
    with pytest.raises(FederatedError, match="it refuses"):
        round_.people["c1"].reveal(names[2:])


def test_tampered_messages_are_detected() -> None:
    names = ["a", "b", "c"]
    round_ = Round(names)
    swapped = {**round_.keys, "a": replace(round_.keys["a"], mask=round_.keys["b"].mask)}
    with pytest.raises(FederatedError, match="the keys of a are not those that it gave"):
        round_.people["a"].share(round_.cohort, swapped)
    twin = {**round_.keys, "c": replace(round_.keys["b"], client="c")}
    with pytest.raises(FederatedError, match="the same keys"):
        round_.people["a"].share(round_.cohort, twin)
    round_.share(set())
    encrypted_shares = round_.inbox("a")
    broken = {**encrypted_shares, "b": encrypted_shares["b"][:-1] + bytes([encrypted_shares["b"][-1] ^ 1])}
    with pytest.raises(FederatedError, match="what b wrote to a was changed"):
        round_.people["a"].mask(broken, {})
    with pytest.raises(FederatedError, match="what b wrote to a was changed"):
        round_.people["a"].mask({**encrypted_shares, "b": encrypted_shares["c"]}, {})
    with pytest.raises(FederatedError, match="z wrote to a and is not a partner of it"):
        round_.people["a"].mask({**encrypted_shares, "z": encrypted_shares["b"]}, {})
    round_.mask(values_of(names), set())
    end = MaskedSum(round_.cohort, round_.keys, round_.encrypted_shares, round_.masked)
    assert end.missing() == dict.fromkeys(names, round_.cohort.threshold_of("a"))
    end.add(round_.people["a"].reveal(names))
    assert end.missing() == dict.fromkeys(names, round_.cohort.threshold_of("a") - 1)
    for name in names:
        said = round_.people[name].reveal(names)
        end.add(replace(said, seeds={**said.seeds, "b": said.seeds["b"] ^ 1}) if name == "c" else said)
    with pytest.raises(FederatedError, match="the parts of b's seed do not give what it sealed"):
        end.open()
    with pytest.raises(FederatedError, match="that it was not asked for"):
        end.add(RevealedShares(client="a", keys={"b": 1}))


@pytest.mark.parametrize("count", [4, 9, 40])
def test_partners_are_mutual_and_as_many_as_asked_for(count: int) -> None:
    cohort = Cohort(run="r", number=3, clients=tuple(f"c{k:02}" for k in range(count)), partners=6)
    partners = {name: set(cohort.partners_of(name)) for name in cohort.clients}
    assert all(name in partners[other] for name, of in partners.items() for other in of)
    assert {len(of) for of in partners.values()} == {min(6, count - 1)}
    seen, ahead = set[str](), ["c00"]
    while ahead:
        name = ahead.pop()
        seen.add(name)
        ahead += [other for other in partners[name] if other not in seen]
    assert seen == set(cohort.clients), "nobody is apart"


@given(st.binary(min_size=1, max_size=64), st.integers(1, 12), st.data())
def test_enough_parts_give_the_secret_and_fewer_do_not(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    parts = key_agreement.split_secret(secret, count, threshold)
    chosen = data.draw(st.permutations(sorted(parts)))[:threshold]
    assert key_agreement.join_shares({place: parts[place] for place in chosen}, len(secret)) == secret
    if threshold > 1:
        fewer = {place: parts[place] for place in chosen[:-1]}
        assert key_agreement.join_shares(fewer, 65) != secret.rjust(65, b"\0"), "one part too few gives another number"


def test_terms_are_cut_off_and_counted_and_never_overflow() -> None:
    clients = 1000
    shift = fixed_point_shift(SETTINGS, clients)
    tensor = torch.tensor([0.5, -8.0, 9.0, -1e30, 3e-9])
    made, cut = fixed_point_terms(tensor, SETTINGS.max_weight, shift, SETTINGS)
    assert cut == 2
    kept = [Fraction(x) for x in (0.5, -8.0, 8.0, -8.0, torch.tensor(3e-9).item())]
    assert made.tolist() == [round(x * SETTINGS.max_weight * Fraction(2) ** shift) for x in kept]
    assert clients * max(abs(x) for x in made.tolist()) < 2**63
    with pytest.raises(FederatedError, match="not finite"):
        fixed_point_terms(torch.tensor([torch.nan]), 1, shift, SETTINGS)
    with pytest.raises(FederatedError, match="from 1 to"):
        fixed_point_terms(tensor, 0, shift, SETTINGS)


def test_secrets_of_rounds_have_nothing_in_common() -> None:
    seen = set()
    for number in (1, 2):
        round_ = Round(["a", "b"], number=number)
        round_.share(set())
        round_.mask({name: {"model/x": torch.zeros(8, dtype=torch.int64)} for name in ("a", "b")}, set())
        seen |= {hashlib.sha256(masked["model/x"].numpy().tobytes()).digest() for masked in round_.masked.values()}
    assert len(seen) == 4


def test_letters_are_as_long_as_the_server_expects() -> None:
    played = Round(["a", "b", "c"])
    played.share(set())
    assert {len(letter) for sent in played.encrypted_shares.values() for letter in sent.values()} == {
        ENCRYPTED_SHARE_BYTES
    }
