"""Tools for a run's rounds: show, check, edit, fork, prune, and convert from and to centralised runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import Quadratic

from arclight import checkpoint
from arclight.federated.clients.client import Client
from arclight.federated.errors import FederatedError
from arclight.federated.rounds import tools
from arclight.federated.rounds.initial_weights import moments_of
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAdam, FedAvg, FedNesterov

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.ones(5)}


def settings(**given: object) -> Federation:
    return Federation(
        **{"clients": 2, "rounds": 3, "local_steps": 3, "strategy": FedNesterov(), "keep_rounds": 0, **given}  # type: ignore[arg-type]
    )


def clients() -> list[Client]:
    return [
        Client(name, learner=lambda _, goal=goal: Quadratic(goal, samples=4))  # type: ignore[misc]
        for name, goal in (("a", 1.0), ("b", -2.0))
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    Server(settings(), START, folder=folder).run(clients())
    return folder


def test_rounds_are_listed_with_what_they_are_worth(finished: Path, tmp_path: Path) -> None:
    listed = tools.list_rounds(finished)
    assert [(each.number, each.complete, each.clock, each.contributors) for each in listed] == [
        (0, True, 0, 0), (1, True, 3, 2), (2, True, 6, 2), (3, True, 9, 2),
    ]  # fmt: skip
    assert all(each.loss is not None and each.bytes > 0 for each in listed[1:])
    with pytest.raises(FederatedError, match="has no rounds"):
        tools.list_rounds(tmp_path)


def test_inspect_round_describes_a_round(finished: Path) -> None:
    found = tools.inspect_round(finished, 2)
    assert (found.run, found.seed, found.strategy) == ("run", 0, "FedNesterov")
    assert found.clients == {
        name: {"rounds": 2, "steps": 6, "samples": 24, "tokens": 0, "last": 2} for name in ("a", "b")
    }
    assert found.record["contributors"] == ["a", "b"]
    assert json.loads(found.to_json())["settings"]["local_steps"] == 3
    assert tools.inspect_round(finished).listed.number == 3
    with pytest.raises(FederatedError, match=r"round 9 of .* is not complete"):
        tools.inspect_round(finished, 9)


def test_validation_finds_what_is_wrong(finished: Path, tmp_path: Path) -> None:
    assert tools.validate(finished) == {0: [], 1: [], 2: [], 3: []}
    tools.fork(finished, tmp_path / "fork", 2)
    file = tmp_path / "fork" / "rounds" / "000002" / "server.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)
    (problem,) = tools.validate(tmp_path / "fork")[2]
    assert "server.safetensors" in problem
    assert "SHA-256" in problem
    moved = tmp_path / "moved" / "rounds"
    moved.mkdir(parents=True)
    tools.fork(finished, tmp_path / "other", 2)
    (tmp_path / "other" / "rounds" / "000002").rename(moved / "000007")
    assert tools.validate(tmp_path / "moved")[7] == [f"{moved / '000007'} says that it is round 2"]


def test_a_fork_goes_on_as_the_run_itself_did(finished: Path, tmp_path: Path) -> None:
    where = tools.fork(finished, tmp_path / "fork", 1)
    assert where == tmp_path / "fork" / "rounds" / "000001"
    server = Server(settings(), folder=tmp_path / "fork")
    rounds = server.run(clients())
    assert [here.round for here in rounds] == [0, 1, 2, 3]
    assert [here.clock for here in rounds] == [0, 3, 6, 9]
    original = Rounds(finished)
    for name, tensor in server.weights().items():
        assert torch.equal(tensor, original.tensors(3, "model")[name])
    assert Rounds(tmp_path / "fork").trees(3)["round"]["run"] == "fork"
    with pytest.raises(FederatedError, match="holds a run already"):
        tools.fork(finished, tmp_path / "fork", 1)


def test_a_fork_with_another_strategy_starts_its_states_anew(finished: Path, tmp_path: Path) -> None:
    """As a run that begins with the round's weights does."""
    strategy = FedAdam(bias_correction=True)
    tools.fork(finished, tmp_path / "fork", 1)
    server = Server(settings(strategy=strategy), folder=tmp_path / "fork")
    server.run(clients())
    fresh = Server(settings(rounds=2, strategy=strategy), Rounds(finished).tensors(1, "model"), folder=tmp_path / "new")
    fresh.run(clients())
    weights = server.weights()
    assert weights.keys() == fresh.weights().keys()
    assert all(torch.equal(value, weights[name]) for name, value in fresh.weights().items())
    assert tools.validate(tmp_path / "fork") == {1: [], 2: [], 3: []}


def test_a_dry_fork_and_a_dry_edit_change_nothing(finished: Path, tmp_path: Path) -> None:
    tools.fork(finished, tmp_path / "dry", 1, dry_run=True)
    assert not (tmp_path / "dry").exists()
    tools.fork(finished, tmp_path / "fork", 1)
    before = (tmp_path / "fork" / "rounds" / "000001" / "manifest.json").read_bytes()
    edited = tools.edit(tmp_path / "fork", 1, tools.Edit(clock=500, client_steps={"a": 7}))
    assert not edited.done
    assert edited.changes == {"round.clock": (3, 500), "clients.a.steps": (3, 7)}
    assert (tmp_path / "fork" / "rounds" / "000001" / "manifest.json").read_bytes() == before


def test_an_edit_keeps_a_backup_and_later_rounds_count_from_it(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "fork"
    tools.fork(finished, run, 1)
    edited = tools.edit(run, 1, tools.Edit(clock=500, number=2), dry_run=False)
    assert edited.done
    assert edited.backup is not None
    assert checkpoint.load(edited.backup)["round"]["clock"] == 3
    assert Rounds(run).numbers() == [2]
    assert tools.validate(run) == {2: []}
    assert checkpoint.inspect(edited.path).step == 500
    server = Server(settings(), folder=run)
    rounds = server.run(clients())
    assert [(here.round, here.clock) for here in rounds if here.contributors][-1] == (3, 503)
    with pytest.raises(FederatedError, match="has a journal"):
        tools.edit(run, 3, tools.Edit(clock=1))
    with pytest.raises(FederatedError, match="has no client 'c'"):
        tools.edit(_forked(finished, tmp_path / "more"), 1, tools.Edit(client_steps={"c": 1}))


def _forked(finished: Path, target: Path) -> Path:
    tools.fork(finished, target, 1)
    return target


def test_pruning_keeps_the_newest_complete_rounds(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    for number in (1, 2, 3):
        tools.fork(finished, tmp_path / str(number), number)
        (run / "rounds").mkdir(parents=True, exist_ok=True)
        (tmp_path / str(number) / "rounds" / f"{number:06d}").rename(run / "rounds" / f"{number:06d}")
    (run / "rounds" / "000004").mkdir()
    assert tools.prune(run, keep=2) == [1, 4]
    assert Rounds(run).numbers() == [1, 2, 3, 4]
    assert tools.prune(run, keep=2, dry_run=False) == [1, 4]
    assert Rounds(run).numbers() == [2, 3]
    with pytest.raises(ValueError, match="at least the newest round must stay"):
        tools.prune(run, keep=0)
    damage(run / "rounds" / "000003" / "model.safetensors")
    assert tools.prune(run, keep=1) == [3], "what stays has been read"
    damage(run / "rounds" / "000002" / "model.safetensors")
    with pytest.raises(FederatedError, match=r"no round of .* is sound, and nothing was removed"):
        tools.prune(run, keep=1, dry_run=False)
    assert Rounds(run).numbers() == [2, 3]


def damage(file: Path) -> None:
    """One byte of the last tensor, so that sizes are as they were."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_run_that_is_served_is_not_pruned(tmp_path: Path) -> None:
    server = Server(settings(rounds=2), START, folder=tmp_path / "run")
    server.run(clients())
    with server.opened(), pytest.raises(FederatedError, match="in use by another process"):
        tools.prune(tmp_path / "run", keep=1, dry_run=False)


def test_tools_work_at_addresses(finished: Path, tmp_path: Path) -> None:
    import fsspec

    address = f"memory://{tmp_path.name}/fork"
    try:
        tools.fork(finished, address, 2)
        assert [each.number for each in tools.list_rounds(address)] == [2]
        assert tools.validate(address) == {2: []}
        tools.edit(address, 2, tools.Edit(clock=77), dry_run=False, backup=False)
        assert tools.inspect_round(address).listed.clock == 77
        tools.fork(address, tmp_path / "back")
        assert Rounds(tmp_path / "back").trees(2)["round"]["clock"] == 77
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_run_begins_with_a_centralised_checkpoint_and_ends_as_one(tmp_path: Path) -> None:
    central = {name: tensor + 0.25 for name, tensor in START.items()}
    checkpoint.save(tmp_path / "central", {"model": central, "progress": {"global_step": 40}})
    server = Server(settings(strategy=FedAvg(), rounds=1), tmp_path / "central", folder=tmp_path / "run")
    rounds = server.run(clients())
    assert [here.clock for here in rounds] == [40, 43]
    assert torch.equal(Rounds(tmp_path / "run").tensors(0, "model")["w"], central["w"])
    last = Rounds(tmp_path / "run").path(1)
    module = torch.nn.Module()
    module.w, module.b = (torch.nn.Parameter(torch.zeros_like(START[name])) for name in ("w", "b"))
    module.load_state_dict(checkpoint.load_weights(last))
    assert torch.equal(module.w, server.weights()["w"])


def test_a_fork_begins_where_the_round_was(finished: Path, tmp_path: Path) -> None:
    for name in ("looked at", "run"):
        tools.fork(finished, tmp_path / name, 2)
    with Server(settings(), folder=tmp_path / "looked at").opened() as run:
        state = run.coordinator.state
        assert run.runtime.until(lambda: state.committed >= 0, 60)  # a thread of the run commits it
        assert (state.committed, state.clock) == (2, 6)
    rounds = Server(settings(), folder=tmp_path / "run").run(clients())
    assert [(here.round, here.clock) for here in rounds[-2:]] == [(2, 6), (3, 9)]


def test_moments_of_a_centralised_run_are_where_clients_begin(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "progress": {"global_step": 1}}
    checkpoint.save(tmp_path / "central", state)
    asked = settings(moments=("exp_avg",), strategy=FedAvg())
    server = Server(asked, tmp_path / "central", folder=tmp_path / "run")
    with server.opened():
        kept = server.rounds.tensors(0, "moments")
    assert kept.keys() == {"exp_avg/weight", "exp_avg/bias"}
    assert torch.equal(kept["exp_avg/weight"], optimizer.state[model.weight]["exp_avg"])
    with pytest.raises(FederatedError, match="keeps 'momentum_buffer'"):
        moments_of(tmp_path / "central", ["momentum_buffer"])
