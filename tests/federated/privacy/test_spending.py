"""The noise that is on the weights of real runs, measured, and what is said to be spent for it, composed independently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting import rdp

from arclight import recipe
from arclight.federated import Client
from arclight.federated.clients.learner import Outcome
from arclight.federated.coordination.sampling import Roster, Sampler
from arclight.federated.coordination.settings import Hours, Sampling, Waiting
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.noise import Budget, BudgetError, Ledger, Release, spent_before
from arclight.federated.privacy.settings import Noise, SecureSum
from arclight.federated.rounds import tools
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation

SIZE, CLIP = 20_000, 0.5
START = {"w": torch.zeros(SIZE)}


class Still:
    """Changes nothing, so that all that moves the weights is noise; fails where it is told to."""

    def __init__(self, fails_in: tuple[int, ...] = ()) -> None:
        self._fails_in = fails_in

    def fit(self, order: Any, weights: Mapping[str, torch.Tensor], progress: Any) -> Outcome:
        if order.round in self._fails_in:
            raise RuntimeError("this site has lost power")
        progress(order.steps, None)
        return Outcome(
            tensors={key: one.clone() for key, one in weights.items()}, samples=8, tokens=8, steps=order.steps
        )

    def evaluate(self, order: Any, weights: Mapping[str, torch.Tensor]) -> Outcome:
        return Outcome(samples=1, metrics={"loss": 1.0})

    def close(self) -> None:
        pass


def federation(by: str = "server", multiplier: float = 1.0, **given: Any) -> Federation:
    noise = Noise(clip=CLIP, multiplier=multiplier, by=by, epsilon=given.pop("epsilon", None))
    usual: dict[str, Any] = {"clients": 10, "rounds": 3, "local_steps": 1, "weigh_by": "equal", "evaluate_every": 0}
    usual |= {"keep_rounds": 0, "waiting": Waiting(quorum=1.0)}
    return Federation(**{**usual, "noise": noise, **given})


def run(server: Server, count: int = 10, fails: Mapping[int, tuple[int, ...]] | None = None) -> Server:
    fails = fails or {}
    names = [str(number) for number in range(count)]
    server.run([Client(name, learner=lambda folder, name=name: Still(fails.get(int(name), ()))) for name in names])  # type: ignore[misc]
    return server


def spent(server: Server, number: int) -> dict[Release, int]:
    return dict(spent_before(server.rounds.trees(number, "privacy"), number).releases)


def spent_in(server: Server, number: int) -> Release:
    before, after = spent(server, number - 1), spent(server, number)
    (one,) = [one for one, times in after.items() if times != before.get(one, 0)]
    assert after[one] == before.get(one, 0) + 1
    return one


def measured(server: Server, number: int) -> float:
    """Standard deviation of what moved the sum of changes in a round, over the clip."""
    moved = server.rounds.tensors(number, "model")["w"] - server.rounds.tensors(number - 1, "model")["w"]
    return float(moved.double().std()) * len(server.history[number].contributors) / CLIP


def composed(events: list[tuple[float, int | None]], clients: int, delta: float = 1e-5) -> float:
    """Asked of the library directly. events: multiplier of each round, and how many it drew by chance."""
    plain, sampled = (
        rdp.RdpAccountant(),
        rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE),
    )
    for multiplier, drawn in events:
        plain.compose(dp_accounting.GaussianDpEvent(multiplier))
        half = dp_accounting.GaussianDpEvent(multiplier / 2)
        if drawn is not None:
            half = dp_accounting.SampledWithoutReplacementDpEvent(clients, drawn, half)
        sampled.compose(half)
    found = float(plain.get_epsilon(delta))
    by_chance = any(drawn is not None for _, drawn in events)
    return min(found, float(sampled.get_epsilon(delta))) if by_chance else found


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "dropout": {"sampling": Sampling(dropout=0.6)},
    "drawn": {"sampling": Sampling(per_round=5)},
    "drawn-dropout": {"sampling": Sampling(per_round=6, dropout=0.5)},
    "hours": {"sampling": Sampling(hours=Hours(length=6, per_round=5))},
    "quorum": {"waiting": Waiting(quorum=0.5)},
}
TWICE = [("drawn", "clients"), ("drawn-dropout", "server")]
"""Not tested: the library takes a second to count each draw, and others show the same."""
QUICK = [("dropout", "server"), ("drawn", "server"), ("hours", "clients"), ("quorum", "clients")]


@pytest.mark.parametrize(
    ("case", "by"),
    [
        (case, by) if (case, by) in QUICK else pytest.param(case, by, marks=pytest.mark.slow)
        for case in CASES
        for by in ("server", "clients")
        if (case, by) not in TWICE
    ],
)
def test_noise_of_real_runs_is_what_was_promised_and_what_is_counted(tmp_path: Path, case: str, by: str) -> None:
    asked = federation(by, rounds=2, **CASES[case])
    fails = dict.fromkeys(range(4), (1, 2, 3)) if case == "quorum" else {}
    server = run(Server(asked, START, folder=tmp_path / "run"), fails=fails)
    sizes, events = [len(here.contributors) for here in server.history[1:]], []
    for number, size in enumerate(sizes, 1):
        found, said = measured(server, number), spent_in(server, number)
        assert found >= 0.975, "no round has less noise than promised"
        assert found == pytest.approx(said.multiplier, rel=0.025)
        assert said.drawn == (size if case.startswith("drawn") else None)
        events.append((said.multiplier, said.drawn))
    assert server.history[len(sizes)].epsilon == pytest.approx(composed(events, 10))
    if case in ("dropout", "drawn-dropout", "hours"):
        assert min(sizes) < (asked.sampling.per_round or 10), "somebody was missing"
    if case == "quorum":
        assert all(5 <= size <= 6 for size in sizes), "whoever fails is left out, and the first five are enough"
        assert [one for one, _ in events] == pytest.approx(
            [math.sqrt(n / 5) if by == "clients" else 1.0 for n in sizes]
        )


def test_noise_of_secure_sums_is_what_was_promised(tmp_path: Path) -> None:
    asked = federation(
        "clients", clients=5, rounds=2, sampling=Sampling(dropout=0.3), secure=SecureSum(step_timeout_s=20.0)
    )
    server = run(Server(asked, START, folder=tmp_path / "run"), 5)
    assert min(len(here.contributors) for here in server.history[1:]) < 5
    for number in (1, 2):
        assert measured(server, number) == pytest.approx(1.0, rel=0.025)
        assert spent_in(server, number) == Release(multiplier=1.0)


def test_noise_is_divided_among_the_clients_that_the_run_has(tmp_path: Path) -> None:
    """Fewer names than ``federation.clients``."""
    server = Server(federation("clients", rounds=1), START, folder=tmp_path / "run", clients=["0", "1", "2"])
    run(server, 3)
    assert measured(server, 1) == pytest.approx(1.0, rel=0.025)
    assert spent_in(server, 1).multiplier == pytest.approx(1.0)


def test_a_round_does_not_close_below_what_its_noise_was_divided_by(tmp_path: Path) -> None:
    """The quorum is lowered after clients were told how many would share the noise."""
    asked = federation("clients", clients=4, rounds=1, waiting=Waiting(quorum=1.0, retries=0))
    with pytest.raises(FederatedError, match="or let rounds close with fewer updates"):
        run(Server(asked, START, folder=tmp_path / "run"), 4, {0: (1,)})
    lower = replace(asked, waiting=Waiting(quorum=0.5, retries=0))
    with Server(lower, folder=tmp_path / "run").opened() as again:
        gathered = again.coordinator.state.open[1]
        assert gathered.least == 4
        assert again.coordinator.need(gathered) == 4
    with pytest.raises(
        FederatedError, match="4 clients share its noise: fork the run from round 0 to have fewer do so"
    ):
        run(Server(lower, folder=tmp_path / "run"), 4, {0: (1,)})


def test_a_fork_counts_what_was_spent_before(tmp_path: Path) -> None:
    first = run(Server(federation(multiplier=0.5, clients=3, rounds=2), START, folder=tmp_path / "first"), 3)
    assert first.history[2].epsilon == pytest.approx(composed([(0.5, None)] * 2, 3))
    tools.fork(tmp_path / "first", tmp_path / "fork")
    second = run(Server(federation(multiplier=5.0, clients=3, rounds=4), folder=tmp_path / "fork"), 3)
    told = [here.epsilon for here in second.history if here.round in (3, 4)]
    assert told == pytest.approx([composed([(0.5, None)] * 2 + [(5.0, None)] * more, 3) for more in (1, 2)])
    assert spent(second, 4) == {Release(multiplier=0.5): 2, Release(multiplier=5.0): 2}
    tools.fork(tmp_path / "fork", tmp_path / "quiet")
    without = replace(federation(clients=3, rounds=5), noise=None)
    quiet = run(Server(without, folder=tmp_path / "quiet"), 3)
    assert spent(quiet, 5) == spent(second, 4), "a fork without noise forgets nothing"
    tools.fork(tmp_path / "first", tmp_path / "poor")
    poor = Server(federation(multiplier=5.0, clients=3, rounds=3, epsilon=10.0), folder=tmp_path / "poor")
    with pytest.raises(BudgetError, match=r"1 rounds would spend .*, 2 earlier ones included, .* pays for 0 rounds"):
        run(poor, 3)


def test_weights_of_a_run_with_noise_bring_along_what_they_have_cost(tmp_path: Path) -> None:
    run(Server(federation(clients=3, rounds=1), START, folder=tmp_path / "first"), 3)
    weights = tmp_path / "first" / "rounds" / "000001"
    second = run(Server(federation(clients=3, rounds=1), weights, folder=tmp_path / "second"), 3)
    assert spent(second, 1) == {Release(multiplier=1.0): 2}


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    asked = federation(clients=3, rounds=1)
    run(Server(asked, START, folder=tmp_path / "run"), 3)
    server = run(Server(replace(asked, rounds=3), folder=tmp_path / "run"), 3)
    assert spent(server, 3) == {Release(multiplier=1.0): 3}
    assert server.history[3].epsilon == pytest.approx(composed([(1.0, None)] * 3, 3))


def test_rounds_of_older_versions_count_with_the_least_noise_that_they_can_have_had() -> None:
    table: dict[str, Any] = {
        "clients": 9,
        "noise": {"multiplier": 2.0, "by": "clients"},
        "sampling": {"per_round": 4},
        "waiting": {"quorum": 1.0},
    }
    trees = {"federation": {"settings": table}}
    assert spent_before(trees, 5).releases == {Release(multiplier=1.0): 5}
    table["noise"] = {"multiplier": 2.0, "by": "server"}
    assert spent_before({"federation": {"settings": table}}, 5).releases == {Release(multiplier=2.0): 5}
    assert not spent_before({"federation": {"settings": {**table, "noise": None}}}, 5)
    assert not spent_before({}, 0)


def test_a_ledger_that_grows_is_the_one_that_is_read() -> None:
    grown, releases = (
        Ledger(),
        [Release(multiplier=z, clients=20, drawn=m) for z, m in ((1.0, 4), (2.0, None))],
    )
    for one in releases:
        grown = grown.after(one)
        assert grown.epsilon(1e-5) > 0
    again = spent_before({"privacy": grown.to_table()}, 3)
    assert again.releases == grown.releases
    assert again.epsilon(1e-5) == pytest.approx(grown.epsilon(1e-5))


def test_a_round_that_others_answered_is_not_counted_as_drawn_by_chance(tmp_path: Path) -> None:
    """A client of the first draw fails, and another is asked in its place."""
    asked = federation(rounds=1, sampling=Sampling(per_round=4), waiting=Waiting(quorum=1.0, retries=3))
    drawn = Sampler(asked.sampling, Roster(10), 0).draw(1)
    server = run(Server(asked, START, folder=tmp_path / "run"), fails={int(drawn[0]): (1,)})
    assert set(server.history[1].contributors) != set(drawn)
    assert spent_in(server, 1) == Release(multiplier=1.0)


def test_a_round_beyond_the_budget_is_not_published() -> None:
    budget = Budget(noise=Noise(clip=1, multiplier=1.0, epsilon=6.0), clients=4, per_round=4)
    one = Release(multiplier=1.0)
    assert budget.exceeded(Ledger({one: 1})) is None
    said = budget.exceeded(Ledger({one: 2}))
    assert said is not None
    assert f"epsilon = {Ledger({one: 2}).epsilon(1e-5):.3g}" in said


def test_noise_that_cannot_be_divided_is_refused() -> None:
    table = {"noise": {"clip": 1, "multiplier": 1, "by": "clients"}, "weigh_by": "equal", "masks": {"experts": {}}}
    with pytest.raises(recipe.RecipeError, match=r"noise\.by"):
        recipe.read(Federation, table)
