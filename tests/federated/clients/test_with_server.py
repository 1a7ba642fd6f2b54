"""Clients and the real server, in one process: one client is centralised training, and several learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.clients.sites import Net, Rows, centralised, weights_of
from tests.federated.fakes import Quadratic

from arclight.deploy import Int8, convert, prepare_qat
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.coordination.settings import Sampling
from arclight.federated.errors import FederatedError
from arclight.federated.rounds.store import Rounds
from arclight.federated.rounds.tools import fork
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAdam
from arclight.federated.transports.link import InProcessLink

CPU = {"accelerator": "cpu"}


def federated(folder: Path, federation: Federation, names: list[str], **trainer: Any) -> Server:
    torch.manual_seed(1)
    server = Server(federation, Net(norm=True), folder=folder / "run", clients=names)
    clients = [Client(name, Net(norm=True), Rows(seed=len(name)), trainer={**CPU, **trainer}, seed=5) for name in names]
    with server.opened() as run:
        node = Node(InProcessLink(run.service), clients, folder / "node", "n")
        node.run()
        assert "done" in node.closed
    return server


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_client_is_centralised_training(tmp_path: Path, accumulate: int) -> None:
    """Dropout, AdamW, a schedule, batch norm, shuffled data over several epochs: 4 rounds of 7 steps are 28 steps."""
    federation = Federation(clients=1, rounds=4, local_steps=7, send="weights", evaluate_on="clients")
    server = federated(tmp_path, federation, ["a"], accumulate_grad_batches=accumulate)
    torch.manual_seed(1)
    whole = Net(norm=True)
    centralised(tmp_path, whole, Rows(seed=1), 28, seed=5, accumulate_grad_batches=accumulate)
    central = {key.removeprefix("model/"): value for key, value in weights_of(whole).items()}
    weights = server.weights()
    assert weights.keys() == central.keys()
    for name, value in central.items():
        assert torch.equal(weights[name], value), name


def test_several_clients_learn_together(tmp_path: Path) -> None:
    federation = Federation(clients=3, rounds=3, local_steps=8, evaluate_on="clients")
    server = federated(tmp_path, federation, ["a", "bb", "ccc"])
    losses = [one.metrics["val/loss"] for one in server.history if "val/loss" in one.metrics]
    assert len(losses) >= 3
    assert losses[-1] < losses[0]


class Flagged(Net):
    """Keeps buffers of types that have no mean or no differences."""

    def __init__(self) -> None:
        super().__init__()
        types = (torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64)
        for number, dtype in enumerate(types):
            self.register_buffer(f"kept_{number}", torch.ones(2).to(dtype))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.copy_(torch.zeros(2))
        return super().training_step(batch, batch_idx)


class Narrow(Net):
    """Trains a buffer of 8-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2).to(torch.float8_e4m3fn))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.copy_(torch.tensor([3.0, 5.0]))
        return super().training_step(batch, batch_idx)


def test_buffers_that_cannot_be_averaged_stay_where_they_are(tmp_path: Path) -> None:
    torch.manual_seed(1)
    server = Server(
        Federation(clients=1, rounds=1, local_steps=2, evaluate_every=0), Flagged(), folder=tmp_path / "run"
    )
    (_, round) = server.run([Client("a", Flagged(), Rows(), trainer=CPU, seed=5)])
    assert round.contributors == ["a"]
    for name, value in Flagged().named_buffers():
        assert torch.equal(server.weights()[name].view(torch.uint8), value.view(torch.uint8)), name


def test_buffers_of_8_bit_floats_are_averaged(tmp_path: Path) -> None:
    federation = Federation(clients=1, rounds=1, local_steps=2, evaluate_every=0)
    server = Server(federation, Narrow(), folder=tmp_path / "run")
    server.run([Client("a", Narrow(), Rows(), trainer=CPU, seed=5)])
    assert server.weights()["seen"].dtype is torch.float8_e4m3fn
    assert server.weights()["seen"].float().tolist() == [3.0, 5.0]


def test_values_of_a_learner_without_changes_are_named(tmp_path: Path) -> None:
    start = {"w": torch.zeros(3), "seen": torch.tensor([True, False])}
    server = Server(Federation(clients=1, rounds=1, local_steps=2, evaluate_every=0), start, folder=tmp_path / "run")
    with pytest.raises(
        FederatedError, match=r"model/seen is of torch\.bool, which has no changes to send: leave it out"
    ):
        server.run([Client("a", learner=lambda _: Quadratic(1.0))])


class Counted(Net):
    """Counts the steps that it is trained."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def rounded(reduced: bool) -> Counted:
    torch.manual_seed(1)
    net = Counted(norm=True)
    net.net = prepare_qat(net.net, torch.randn(4, 8), recipe=Int8(reduce_range=reduced, min_sqnr_db=-50))
    return net


@pytest.mark.parametrize("reduced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_without_a_record_of_their_bits_train_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reduced: bool
) -> None:
    """A federation of models that were prepared by hand before there was such a record: what their recipe names holds."""
    federation = Federation(clients=1, rounds=2, local_steps=2, evaluate_every=0)
    begun = {name: value for name, value in rounded(reduced).state_dict().items() if not name.endswith("weight_bits")}
    server = Server(federation, begun, folder=tmp_path / "run", clients=["a"])
    model = rounded(reduced)
    with server.opened() as run:
        Node(
            InProcessLink(run.service), [Client("a", model, Rows(), trainer=CPU, seed=5)], tmp_path / "node", "n"
        ).run()
    assert sum(bool(one.contributors) for one in server.history) == 2, caplog.text
    assert server.weights().keys() == begun.keys()
    model.load_state_dict(server.weights())
    assert convert(model.net).recipe.reduce_range == reduced


@pytest.mark.slow
def test_clients_that_round_to_other_bits_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bits of a model that is trained with rounding are sent with its weights, and compared before it is trained."""
    federation = Federation(clients=2, rounds=2, local_steps=2, evaluate_every=0)
    server = Server(federation, rounded(True), folder=tmp_path / "run", clients=["a", "b"])
    models = [rounded(name == "a") for name in "ab"]
    clients = [Client(name, model, Rows(), trainer=CPU, seed=5) for name, model in zip("ab", models)]
    with server.opened() as run:
        Node(InProcessLink(run.service), clients, tmp_path / "node", "n").run()
    assert "reduce_range=True, which is False here" in caplog.text
    assert (models[0].steps > 0, models[1].steps) == (True, 0)
    weights = server.weights()
    assert int(weights["net.fake_quantize.weight_bits"]) == 7
    again = rounded(True)
    again.load_state_dict(weights)
    assert convert(again.net).recipe.reduce_range


def test_committed_updates_are_deleted_for_clients_not_drawn_again(tmp_path: Path) -> None:
    federation = Federation(clients=6, rounds=8, local_steps=1, evaluate_every=0, sampling=Sampling(per_round=1))
    server = Server(federation, {"w": torch.ones(3)}, folder=tmp_path / "run")
    clients = [Client(str(number), learner=lambda _: Quadratic(1.0)) for number in range(6)]
    with server.opened() as run:
        Node(InProcessLink(run.service), clients, tmp_path / "node", "n").run()
        assert run.runtime.wait(60)
    assert len({name for here in server.history for name in here.contributors}) > 2
    left = [path.name for path in (tmp_path / "node").rglob("finished/0*")]
    assert set(left) <= {"000008"}, "of the last round alone it may not have been said that it is committed"


def test_statistics_of_norms_are_left_to_the_mean(tmp_path: Path) -> None:
    """Adam's steps of a fixed size make a variance negative within two rounds; a later run goes on as the first."""
    federation = Federation(clients=2, rounds=2, local_steps=8, strategy=FedAdam(lr=0.5), evaluate_every=0)
    server = federated(tmp_path, federation, ["a", "bb"])
    fork(tmp_path / "run", tmp_path / "fork")
    for rounds in (server.rounds, Rounds(tmp_path / "fork")):
        assert sorted(rounds.trees(2)["buffers"]) == [
            "net.1.num_batches_tracked", "net.1.running_mean", "net.1.running_var"
        ]  # fmt: skip
    assert bool((server.weights()["net.1.running_var"] > 0.1).all())
    stepped = {name.partition("/")[2] for name in server.rounds.stored(2, "server")}
    assert "net.1.weight" in stepped
    assert not [name for name in stepped if "running" in name]


def test_a_new_run_of_a_used_name_trains_from_scratch(tmp_path: Path) -> None:
    """Files of a former run are not used in a new one of the same name and initial weights."""
    federation = Federation(clients=1, rounds=1, local_steps=3, evaluate_every=0)
    client = Client("a", Net(), Rows(seed=1), trainer=CPU, seed=5)
    bases = []
    for number in range(2):
        torch.manual_seed(1)
        server = Server(federation, Net(), folder=tmp_path / str(number), run="run", clients=["a"])
        with server.opened() as run:
            Node(InProcessLink(run.service), [client], tmp_path / "node", "n").run()
            bases.append((run.service.run, server.history[1].steps))
    assert bases[0][0] != bases[1][0]
    assert len([path for path in (tmp_path / "node").iterdir() if path.is_dir()]) == 2
