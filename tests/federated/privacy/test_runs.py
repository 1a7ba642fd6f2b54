"""Robust means and noise in whole runs, seen through the public server."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.federated.fakes import Quadratic

from arclight.federated.clients.node import Node
from arclight.federated.coordination.settings import Waiting
from arclight.federated.privacy.noise import BudgetError
from arclight.federated.privacy.settings import Krum, Median, Noise, NormBound, Robust, SecureSum, Trimmed
from arclight.federated.rounds.history import read_history
from arclight.federated.server.server import Server
from arclight.federated.settings import Checks, Federation
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4)}
ANY = Checks(norm_times=0)
REST = [Trimmed(share=0.2), Krum(byzantine=1, keep=2), NormBound(largest=10.0)]


@dataclass
class Site:
    """A client as a node's executor takes it, whose learner is known in closed form."""

    name: str
    goal: float

    def learner(self, folder: Path) -> Quadratic:
        return Quadratic(self.goal)


def trained(server: Server, goals: list[float]) -> Server:
    sites: list[Any] = [Site(str(k), goal) for k, goal in enumerate(goals)]
    with server.opened() as run:
        node = Node(InProcessLink(run.service), sites, Path(server.folder) / "node", "n")
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the node has not ended within 60 s"
        assert run.runtime.wait(60)
    return server


@pytest.mark.parametrize("robust", [Median(), *(pytest.param(one, marks=pytest.mark.slow) for one in REST)], ids=repr)
def test_robust_aggregation_bounds_a_malicious_client(tmp_path: Path, robust: Robust) -> None:
    federation = Federation(clients=5, rounds=2, local_steps=20, robust=robust, checks=ANY, waiting=Waiting(quorum=1.0))
    server = trained(Server(federation, START, folder=tmp_path / "run"), [1.0, 1.1, 0.9, 1.0, 1e6])
    assert (server.weights()["w"] - 1).abs().max() < 4
    plain = Federation(clients=5, rounds=2, local_steps=20, checks=ANY)
    lost = trained(Server(plain, START, folder=tmp_path / "plain"), [1.0, 1.1, 0.9, 1.0, 1e6])
    assert lost.weights()["w"].min() > 1e4


@pytest.mark.parametrize("by", ["server", "clients"])
def test_a_run_with_noise_reports_its_privacy_budget(tmp_path: Path, by: str) -> None:
    start = {"w": torch.zeros(20_000)}
    noise = Noise(clip=0.5, multiplier=2.0, epsilon=20.0, by=by)
    federation = Federation(
        clients=4, rounds=3, local_steps=2, noise=noise, weigh_by="equal", checks=ANY, waiting=Waiting(quorum=1.0)
    )
    server = trained(Server(federation, start, folder=tmp_path / "run"), [1.0, 2.0, 1.0, 2.0])
    spent = [here.epsilon for here in server.history]
    assert spent[0] is None
    assert 0 < spent[1] < spent[2] < spent[3] <= 20.0  # type: ignore[operator]
    told = read_history(tmp_path / "run")
    assert [here["epsilon"] for here in told] == spent
    moved = server.weights()["w"].double().numpy()
    deviation = np.sqrt(3) * 2.0 * 0.5 / 4  # of three rounds; the clipped changes move each value by 0.01 in all
    assert stats.kstest((moved - moved.mean()) / deviation, "norm").pvalue > 1e-3


def test_a_run_beyond_its_budget_is_not_begun(tmp_path: Path) -> None:
    noise = Noise(clip=0.5, multiplier=1.0, epsilon=5.0)
    federation = Federation(clients=2, rounds=3, local_steps=2, noise=noise, weigh_by="equal")
    server = Server(federation, START, folder=tmp_path / "run")
    with pytest.raises(BudgetError, match="3 rounds would spend epsilon"), server.opened():
        pass
    assert not (tmp_path / "run" / "rounds").exists()


@pytest.mark.parametrize(("by", "secure"), [("server", None), ("clients", None), ("clients", SecureSum())])
def test_no_noise_takes_a_variance_below_zero(tmp_path: Path, by: str, secure: SecureSum | None) -> None:
    before = 0.01
    start = {"w": torch.zeros(100), "bn.running_mean": torch.zeros(2000), "bn.running_var": torch.full((2000,), before)}
    noise = Noise(clip=0.5, multiplier=2.0, by=by)
    federation = Federation(
        clients=4, rounds=1, local_steps=2, noise=noise, secure=secure, weigh_by="equal", checks=ANY
    )
    server = trained(Server(federation, start, folder=tmp_path / "run"), [1.0, 2.0, 1.0, 2.0])
    weights = server.weights()
    assert weights["bn.running_mean"].min() < -0.1
    variance = weights["bn.running_var"]
    assert variance.min() >= 0
    assert 0.3 < (variance == before).float().mean() < 0.6  # those that noise would have pushed there
    assert variance.max() > 0.3
