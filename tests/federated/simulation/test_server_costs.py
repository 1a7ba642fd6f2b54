"""Costs of this machine's server."""

from __future__ import annotations

from pathlib import Path

from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Fleet
from arclight.federated.simulation.server_costs import measure_costs
from arclight.federated.simulation.simulate import simulate


def test_measured_costs_are_those_of_a_real_server(tmp_path: Path) -> None:
    costs = measure_costs(4 << 20, folder=tmp_path, rate=1e9)
    assert costs.rate == 1e9
    assert 1e-11 < costs.check < 1e-6
    assert 0 <= costs.fold < 1e-6
    assert 0 <= costs.step < 1e-6
    assert 0 < costs.round_s < 10
    assert not list(tmp_path.iterdir())
    result = simulate(Federation(clients=4, rounds=2, evaluate_every=0), 4 << 20, Fleet(costs=costs))
    assert result.fold_seconds > 2 * costs.round_s
