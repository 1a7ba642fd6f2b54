"""Closed rounds that cannot be folded: they are discarded, tried again, and given up or skipped; no start meets them again."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode

from arclight.federated.clients.client import Client
from arclight.federated.clients.learner import Outcome
from arclight.federated.coordination.records import RoundDiscarded, RunEnded
from arclight.federated.coordination.run_database import read_journal
from arclight.federated.coordination.run_state import StateSaved
from arclight.federated.coordination.settings import Waiting
from arclight.federated.errors import FederatedError, RefusedError
from arclight.federated.privacy.settings import Krum, Noise, NormBound, SecureSum
from arclight.federated.protocol import Fit
from arclight.federated.server.published_weights import PublishedWeights, Weights, manifest_of
from arclight.federated.server.server import Server
from arclight.federated.server.server_step import ServerStep, WrittenRound
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 4)}
OLDER = Path(__file__).with_name("older")
"""Folders of runs as earlier versions have left them."""


def settings(**given: Any) -> Federation:
    return Federation(**{"clients": 2, "rounds": 2, "local_steps": 2, "evaluate_every": 0, "waiting": CALM, **given})


def learners(count: int) -> dict[str, Quadratic]:
    return {str(number): Quadratic(float(number) - 1.0, samples=number + 3) for number in range(count)}


def trained(server: Server, count: int = 2) -> Server:
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), learners(count)).work()
        assert run.runtime.wait(60)
    return server


def undisturbed(folder: Path, **given: Any) -> list[str]:
    return [here.base for here in trained(Server(settings(**given), START, folder=folder / "undisturbed")).history]


class Failing:
    """Keeps a number of folds of round 1 from being done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> None:
        self.left, real = times, ServerStep.step

        def step(stepper: ServerStep, number: int, *rest: Any) -> WrittenRound:
            if number == 1 and self.left:
                self.left -= 1
                raise error
            return real(stepper, number, *rest)

        monkeypatch.setattr(ServerStep, "step", step)


ERRORS = (
    RuntimeError("no kernel"),
    FederatedError("the step would make w infinite"),
    OSError(5, "Input/output error"),
    KeyError("w"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_round_whose_fold_fails_once_is_asked_for_again_and_leaves_no_trace_in_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = undisturbed(tmp_path)
    Failing(monkeypatch, 1, error)
    server = trained(Server(settings(), START, folder=tmp_path / "run"))
    assert [here.base for here in server.history] == expected
    (why,) = server.history[1].discarded
    assert str(error) in why


@pytest.mark.parametrize("why", [errno.EIO, errno.ENOSPC])
def test_a_round_whose_weights_cannot_be_served_at_first_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    """Its checkpoint is written by then; the disk is broken for a moment, or full."""
    left, real = [1], PublishedWeights.publish

    def publish(weights: PublishedWeights, number: int, *rest: Any, **more: Any) -> Weights:
        if number == 1 and left:
            raise OSError(why, f"no place {left.pop()}")
        return real(weights, number, *rest, **more)

    asked = {"send": "delta", "weigh_by": "equal", "noise": Noise(multiplier=1.0, clip=1.0)}
    expected = trained(Server(settings(**asked), START, folder=tmp_path / "undisturbed"))
    monkeypatch.setattr(PublishedWeights, "publish", publish)
    server = trained(Server(settings(**asked), START, folder=tmp_path / "run"))
    assert not left
    assert len(server.history[1].discarded) == (why == errno.EIO)
    for entry in ("clients", "privacy"):
        assert server.rounds.trees(2, entry) == expected.rounds.trees(2, entry)
    assert [here.epsilon for here in server.history] == [here.epsilon for here in expected.history]


def test_a_round_that_can_never_be_folded_ends_the_run_which_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(tmp_path)
    Failing(monkeypatch, 2, FederatedError("the step would make w infinite"))
    server = trained(Server(settings(), START, folder=tmp_path / "run"))
    *_, discarded, last = read_journal(tmp_path / "run")
    if isinstance(last, StateSaved):
        assert last.state.ended is not None
        why = last.state.ended
    else:
        assert isinstance(discarded, RoundDiscarded), "a start does not meet the closed round again"
        assert isinstance(last, RunEnded)
        why = last.why
    assert why == "round 1: the step would make w infinite; it was tried 2 times (waiting.retries)"
    again = trained(Server(settings(), folder=tmp_path / "run"))
    assert [here.base for here in again.history] == expected
    assert server.folder == again.folder


def test_a_round_that_can_never_be_folded_may_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, 2, RuntimeError("no kernel"))
    waiting = Waiting(heartbeat_interval_s=20.0, on_failed_round="skip")
    server = trained(Server(settings(waiting=waiting, keep_rounds=0, rounds=3), START, folder=tmp_path / "run"))
    assert [bool(here.skipped) for here in server.history] == [False, True, False, False]
    assert "no kernel" in server.history[1].skipped
    assert [here.contributors for here in server.history] == [[], [], ["0", "1"], ["0", "1"]]
    assert [here.clock for here in server.history] == [0, 0, 2, 4], "nobody has trained in the skipped round"
    assert server.history[1].base == server.history[0].base
    assert torch.equal(server.rounds.tensors(1, "model")["w"], START["w"])
    assert not server.rounds.check_round(1).problems
    assert not torch.equal(server.weights()["w"], START["w"])


def test_a_run_that_is_killed_before_a_skipped_round_is_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, 2, RuntimeError("no kernel"))
    waiting = Waiting(heartbeat_interval_s=20.0, on_failed_round="skip")

    def carry_on(*args: Any) -> None:
        raise SystemExit

    monkeypatch.setattr("arclight.federated.server.server_run.repeat_round", carry_on)
    with pytest.raises(SystemExit), Server(settings(waiting=waiting), START, folder=tmp_path / "run").opened() as run:
        script = ScriptedNode(InProcessLink(run.service), learners(2))
        script.join()
        for _ in range(4):
            order = script.ask()
            assert isinstance(order, Fit)
            assert script.deliver(order).accepted
        run.wait(60)
    monkeypatch.undo()
    assert failing.left == 0
    again = trained(Server(settings(), folder=tmp_path / "run"))
    assert [bool(here.skipped) for here in again.history] == [False, True, False]


def test_blamed_clients_are_left_out_of_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RefusedError("wrong_names", "2 sent other tensors", ("2",))
    Failing(monkeypatch, 1, error)
    server = trained(Server(settings(clients=4), START, folder=tmp_path / "run"), 4)
    assert [here.contributors for here in server.history] == [[], ["0", "1", "3"], ["0", "1", "2", "3"]]
    assert server.history[1].failed == {"2": "its update could not be folded: 2 sent other tensors"}


def test_a_blob_that_the_servers_disk_has_lost_is_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(settings(), START, folder=tmp_path / "run")
    with server.opened() as run:
        script = ScriptedNode(InProcessLink(run.service), learners(2))
        script.join()
        first, second = script.ask(), script.ask()
        assert isinstance(first, Fit)
        assert isinstance(second, Fit)
        assert script.send(script.trained(first)).accepted
        (digest,) = run.runtime.spooled()
        (blob,) = manifest_of(run.blobs, digest).blobs
        path = run.blobs.file(blob)
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(whole[: len(whole) // 2])
        assert script.send(script.trained(second)).accepted
        script.work()
        assert run.runtime.wait(60)
    assert [here.base for here in server.history] == undisturbed(tmp_path)
    assert len(server.history[1].discarded) == 1


class Partly:
    """A learner that may leave a tensor out of what it sends."""

    def __init__(self, left_out: str = "") -> None:
        self.left_out = left_out

    def fit(self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Any) -> Outcome:
        progress(order.steps, None)
        tensors = {key: weights[key] - 0.1 for key in weights if key != self.left_out}
        return Outcome(tensors=tensors, samples=8, tokens=8, steps=order.steps)

    def evaluate(self, order: Any, weights: Mapping[str, torch.Tensor]) -> Outcome:
        return Outcome(samples=1, metrics={"loss": 1.0})

    def close(self) -> None:
        pass


def partly(count: int, *left_out: str) -> list[Client]:
    """Clients, the last of which leave tensors out."""
    wanting = [""] * (count - len(left_out)) + list(left_out)
    return [Client(str(n), learner=lambda _, out=out: Partly(out)) for n, out in enumerate(wanting)]


def secure(**given: Any) -> Federation:
    return settings(clients=4, secure=SecureSum(step_timeout_s=5.0), **given)


MODEL = {"a": torch.ones(4, 4), "b": torch.ones(4)}


def test_a_client_that_leaves_a_tensor_out_of_a_secure_sum_is_left_out_itself(tmp_path: Path) -> None:
    server = Server(secure(), MODEL, folder=tmp_path / "run")
    server.run(partly(4, "model/b"))
    assert [here.contributors for here in server.history] == [[], ["0", "1", "2"], ["0", "1", "2"]]
    assert "3 sent other tensors than the others" in server.history[1].failed["3"]
    torch.testing.assert_close(server.weights()["a"], MODEL["a"] - 0.2, rtol=1e-5, atol=1e-5)


def test_a_secure_run_that_needs_everybody_names_who_has_left_a_tensor_out_and_goes_on_without_the_mistake(
    tmp_path: Path,
) -> None:
    asked = secure(waiting=Waiting(quorum=1.0))
    with pytest.raises(
        FederatedError, match=r"3 sent other tensors than the others.*without 3 there are fewer than the 4"
    ):
        Server(asked, MODEL, folder=tmp_path / "run").run(partly(4, "model/b"))
    server = Server(asked, folder=tmp_path / "run")
    server.run(partly(4))
    assert [here.contributors for here in server.history][1:] == [["0", "1", "2", "3"]] * 2


def test_settings_that_could_close_a_round_that_cannot_be_folded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"close with 3 of 6 updates \(waiting.quorum = 0.5\), Krum.* needs 5: raise"):
        settings(clients=6, robust=Krum(byzantine=1), waiting=Waiting(quorum=0.5))
    with pytest.raises(ValueError, match="needs 6"):
        settings(clients=5, robust=Krum(byzantine=1, keep=5), waiting=Waiting(quorum=1.0))
    settings(clients=6, robust=Krum(byzantine=1))
    with pytest.raises(
        FederatedError, match=r"federation.clients is 4, and 16 clients are named: SecureSum is made for"
    ):
        Server(secure(), MODEL, folder=tmp_path / "run", clients=[f"c{n}" for n in range(16)]).opened().__enter__()


def test_a_norm_bound_of_mostly_zero_updates_leaves_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(settings(clients=3, rounds=1, robust=NormBound()), START, folder=tmp_path / "run")
    still = {"0": Quadratic(0.0, lr=0.0), "1": Quadratic(0.0, lr=0.0), "2": Quadratic(5.0)}
    with caplog.at_level(logging.WARNING), server.opened() as run:
        ScriptedNode(InProcessLink(run.service), still).work()
        assert run.runtime.wait(60)
    assert torch.equal(server.weights()["w"], START["w"])
    assert "2 count for nothing" in caplog.text


@pytest.mark.parametrize("name", ["stopped", "unfoldable"])
def test_runs_of_an_earlier_version_go_on(tmp_path: Path, name: str) -> None:
    """One was stopped in its third round; the other's closed round, of two, can never be folded by Krum, and ended it."""
    shutil.copytree(OLDER / name, tmp_path / "run")
    of = {"clients": 2, "rounds": 4} if name == "stopped" else {"clients": 5, "robust": Krum(byzantine=1)}
    asked = settings(**of, keep_rounds=1, waiting=Waiting(heartbeat_interval_s=20.0, quorum=1.0))
    goals = {"0": 1.0, "1": -3.0} if name == "stopped" else {str(n): float(n) for n in range(5)}

    def run_of(server: Server) -> Server:
        with server.opened() as run:
            ScriptedNode(InProcessLink(run.service), {client: Quadratic(goal) for client, goal in goals.items()}).work()
            assert run.runtime.wait(60)
        return server

    server = run_of(Server(asked, folder=tmp_path / "run", run="older"))
    fresh = run_of(Server(asked, START, folder=tmp_path / "fresh", run="older"))
    assert [here.base for here in server.history] == [here.base for here in fresh.history]
    assert [here.contributors for here in server.history] == [here.contributors for here in fresh.history]
    assert len(server.history[1].discarded) == (name == "unfoldable")
