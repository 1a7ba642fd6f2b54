"""A whole run in one process, seen through its public server."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.federated.server.quadratic import Quadratic, Script

from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.in_process import InProcess

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.zeros(5)}


def settings(**given: object) -> Federation:
    return Federation(**{"clients": 2, "rounds": 3, "local_steps": 4, "keep_rounds": 0, **given})  # type: ignore[arg-type]


def trained(server: Server, learners: dict[str, Quadratic]) -> None:
    with server.opened() as run:
        Script(InProcess(run.service), learners).work()
        assert run.driver.wait(20)


def test_rounds_of_two_clients_are_what_the_closed_form_says(tmp_path: Path) -> None:
    learners = {"0": Quadratic(1.0, samples=8), "1": Quadratic(-3.0, samples=24)}
    server = Server(
        settings(), START, folder=tmp_path / "run", evaluate=lambda weights: {"val/loss": float(weights["b"].mean())}
    )
    trained(server, learners)
    decay, goal = (1 - 0.1) ** 4, (8 * 1.0 + 24 * -3.0) / 32
    expected = {name: goal + decay**3 * (tensor - goal) for name, tensor in START.items()}
    for name, tensor in server.weights().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    rounds = server.history
    assert [here.round for here in rounds] == [0, 1, 2, 3]
    assert [here.clock for here in rounds] == [0, 4, 8, 12]
    assert rounds[2].contributors == ["0", "1"]
    assert rounds[3].loss == rounds[3].metrics["val/loss"]
    assert [learner.steps for learner in learners.values()] == [12, 12]
