"""A whole run in one process, seen through its public server."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.blobs import folder
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import Int8
from arclight.federated.errors import FederatedError
from arclight.federated.masks.settings import Masks
from arclight.federated.protocol import Fit
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.published_weights import manifest_of
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedNesterov
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.zeros(5)}


def settings(**given: object) -> Federation:
    return Federation(**{"clients": 2, "rounds": 3, "local_steps": 4, "keep_rounds": 0, "waiting": CALM, **given})  # type: ignore[arg-type]


def trained(server: Server, learners: dict[str, Quadratic]) -> None:
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), learners).work()
        assert run.runtime.wait(60)


def test_rounds_of_two_clients_match_the_closed_form(tmp_path: Path) -> None:
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


def clients(learners: dict[str, Quadratic]) -> list[Client]:
    return [Client(name, learner=lambda _, learner=learner: learner) for name, learner in learners.items()]


def test_clients_run_in_this_process_without_a_server_to_start(tmp_path: Path) -> None:
    learners = {"left": Quadratic(1.0, samples=8), "right": Quadratic(-3.0, samples=24)}
    server = Server(settings(evaluate_on="clients"), START, folder=tmp_path / "run")
    rounds = server.run(clients(learners))
    assert [here.contributors for here in rounds] == [[], *[["left", "right"]] * 3]
    weights = {f"model/{name}": tensor for name, tensor in server.weights().items()}
    measured = (learners["left"].loss(weights) * 8 + learners["right"].loss(weights) * 24) / 32
    assert abs(rounds[3].metrics["val/loss"] - measured) < 1e-9 * measured


def test_errors_in_the_server_are_raised_by_run(tmp_path: Path) -> None:
    def evaluate(weights: object) -> dict[str, float]:
        raise RuntimeError("the validation data are gone")

    server = Server(settings(), START, folder=tmp_path / "run", evaluate=evaluate)
    with pytest.raises(RuntimeError, match="validation data are gone"):
        server.run(clients({"0": Quadratic(1.0), "1": Quadratic(2.0)}))


def test_a_run_that_was_stopped_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    def evaluate(weights: object) -> dict[str, float]:
        if len(Rounds(tmp_path / "run").numbers()) == 3:
            raise RuntimeError("stop")
        return {}

    learners = {"0": Quadratic(1.0), "1": Quadratic(-3.0)}
    with pytest.raises(RuntimeError, match="stop"):
        Server(settings(), START, folder=tmp_path / "run", evaluate=evaluate).run(clients(learners))
    with pytest.raises(FederatedError, match="was begun with other settings"):
        Server(settings(local_steps=5), folder=tmp_path / "run").run(clients(learners))
    with pytest.raises(FederatedError, match="of run 'run', not of 'other'"):
        Server(settings(), folder=tmp_path / "run", run="other").run(clients(learners))
    server = Server(settings(), folder=tmp_path / "run")
    server.run(clients(learners))
    undisturbed = Server(settings(), START, folder=tmp_path / "again", run="run")
    undisturbed.run(clients({"0": Quadratic(1.0), "1": Quadratic(-3.0)}))
    assert [here.base for here in server.history] == [here.base for here in undisturbed.history]
    assert all(12 <= learner.steps < 16 for learner in learners.values()), "a round that was broken off is begun anew"


def test_a_server_that_left_serves_again(tmp_path: Path) -> None:
    def join(http: HttpServer) -> None:
        link = HttpLink(http.address, tmp_path / "cache")
        threading.Thread(target=Node(link, clients(learners), tmp_path / "node", "node").run, daemon=True).start()

    learners = {"0": Quadratic(1.0), "1": Quadratic(-3.0)}
    server = Server(settings(rounds=1), START, folder=tmp_path / "run")
    server.leave()
    assert len(server.serve()) == 1
    assert not server.over
    assert len(server.serve(ready=join)) == 2
    assert server.over


@pytest.mark.parametrize(
    ("weights", "masks", "message"),
    [
        (START, Masks(personal=("c",)), r"'c', which matches no parameter"),
        (START | {"a#b": torch.zeros(1)}, Masks(), r"model/a#b cannot travel: '#' separates .*masks\.frozen"),
        (START | {"b": torch.tensor([0.0, math.nan])}, Masks(), "b of the initial weights has values that are NaN"),
    ],
)
def test_weights_that_cannot_start_a_run_are_refused_and_not_kept(tmp_path: Path, weights, masks, message) -> None:
    with (
        pytest.raises(FederatedError, match=message),
        Server(settings(masks=masks), weights, folder=tmp_path / "run").opened(),
    ):
        pass
    server = Server(settings(), {"w": torch.ones(2)}, folder=tmp_path / "run")
    with server.opened():
        assert list(server.weights()) == ["w"], "what was refused is not what a later start goes on from"


def test_frozen_weights_may_have_any_name_and_value(tmp_path: Path) -> None:
    frozen = {"mask#1": torch.tensor([0.0, -math.inf])}
    server = Server(settings(masks=Masks(frozen=("mask#1",))), START | frozen, folder=tmp_path / "run")
    with server.opened():
        torch.testing.assert_close(server.weights()["mask#1"], frozen["mask#1"])


@pytest.mark.parametrize(
    "given",
    [pytest.param({"down": Int8()}, marks=pytest.mark.slow), {"down": Int8(), "up": Int8(), "strategy": FedNesterov()}],
)
def test_runs_with_quantized_weights_resume_after_a_stop(tmp_path: Path, given: dict[str, object]) -> None:
    start = {"w": torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), "b": torch.zeros(5)}
    asked = settings(rounds=5, keep_rounds=2, **given)

    def evaluate(weights: object) -> dict[str, float]:
        if Rounds(tmp_path / "run").newest() == 3 and not stopped:
            stopped.append(True)
            raise RuntimeError("stop")
        return {}

    stopped: list[bool] = []
    learners = {"0": Quadratic(1.0), "1": Quadratic(-3.0)}
    with pytest.raises(RuntimeError, match="stop"):
        Server(asked, start, folder=tmp_path / "run", evaluate=evaluate).run(clients(learners))
    server = Server(asked, folder=tmp_path / "run")
    server.run(clients(learners))
    other = Server(asked, start, folder=tmp_path / "other", run="run")
    other.run(clients({"0": Quadratic(1.0), "1": Quadratic(-3.0)}))
    assert [here.base for here in server.history] == [here.base for here in other.history]
    assert all(20 <= learner.steps < 24 for learner in learners.values()), "a round that was broken off is begun anew"
    whole = sum(tensor.numel() * 4 for tensor in start.values())
    assert sum(other.history[5].bytes_down.values()) < 0.35 * whole  # one node fetches for both clients
    assert other.history[5].base != other.rounds.weights(5).digest  # clients see a little less than all


def test_a_round_under_way_counts_what_had_come_before_a_stop(tmp_path: Path) -> None:
    learners = {"0": Quadratic(1.0), "1": Quadratic(-3.0)}
    with Server(settings(rounds=1), START, folder=tmp_path / "run").opened() as run:
        script = ScriptedNode(InProcessLink(run.service), learners)
        script.join()
        order = script.ask()
        assert isinstance(order, Fit)
        assert script.send(script.trained(order)).accepted
    server = Server(settings(rounds=1), folder=tmp_path / "run")
    trained(server, learners)
    assert sorted(learner.steps for learner in learners.values()) == [4, 4]
    assert server.history[1].contributors == ["0", "1"]


@pytest.mark.parametrize("what", ["blob", "manifest"])
def test_an_update_that_a_power_failure_has_damaged_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    learners = {"0": Quadratic(1.0), "1": Quadratic(-3.0)}
    with Server(settings(rounds=1), START, folder=tmp_path / "run").opened() as run:
        script = ScriptedNode(InProcessLink(run.service), learners)
        script.join()
        order = script.ask()
        assert isinstance(order, Fit)
        assert script.send(script.trained(order)).accepted
        (spooled,) = run.runtime.spooled()
        damaged = spooled if what == "manifest" else next(iter(manifest_of(run.service.blobs, spooled).blobs))
        path = run.service.blobs.file(damaged)
    path.write_bytes(
        bytes(path.stat().st_size)
    )  # as some file systems leave a file whose content was not on the disk yet
    monkeypatch.setattr(folder, "running_since", lambda: "another time")
    server = Server(settings(rounds=1), folder=tmp_path / "run")
    trained(server, learners)
    assert f"updates of round 1 are gone, and asked for again: {order.client}" in caplog.text
    undisturbed = Server(settings(rounds=1), START, folder=tmp_path / "again", run="run")
    trained(undisturbed, {"0": Quadratic(1.0), "1": Quadratic(-3.0)})
    assert server.history[1].base == undisturbed.history[1].base
    assert sorted(learner.steps for learner in learners.values()) == [4, 8]


def test_weights_of_one_client_are_its_own_bit_for_bit(tmp_path: Path) -> None:
    server = Server(settings(clients=1, rounds=2, send="weights"), START, folder=tmp_path / "run")
    server.run(clients({"0": Quadratic(0.3)}))
    expected = {name: tensor.clone() for name, tensor in START.items()}
    for _ in range(8):
        for tensor in expected.values():
            tensor.sub_(0.1 * (tensor - 0.3))
    for name, tensor in server.weights().items():
        assert torch.equal(tensor, expected[name])
