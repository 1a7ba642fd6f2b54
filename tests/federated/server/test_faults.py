"""Full disks, doubles, and orders of arrival: the run pauses or refuses, and the weights do not show it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode
from tests.waiting import LIMIT, wait_until

from arclight.checkpoint.files import HashedFile
from arclight.federated.coordination.coordinator import BrokenError, Coordinator
from arclight.federated.coordination.events import Decision
from arclight.federated.coordination.records import UpdateAccepted
from arclight.federated.protocol import Close, Fit, Join, Leave, Message, Receipt, Wait, WorkRequest
from arclight.federated.server.runtime import Runtime
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedNesterov
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 12).reshape(3, 4), "b": torch.ones(5)}


def settings(**given: object) -> Federation:
    return Federation(**{"clients": 2, "rounds": 2, "local_steps": 3, "waiting": CALM, **given})  # type: ignore[arg-type]


def both() -> dict[str, Quadratic]:
    return {"0": Quadratic(1.0), "1": Quadratic(-3.0, samples=5)}


def undisturbed(folder: Path) -> list[str]:
    server = Server(settings(), START, folder=folder / "undisturbed")
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), both()).work()
        assert run.runtime.wait(60)
    return [here.base for here in server.history]


class FullDisk:
    """Fail ``times`` writes to the journal from some write on, as on a full disk."""

    def __init__(self, write: int, times: int) -> None:
        self.good, self.left = write, times

    def __call__(self, point: str, line: int) -> None:
        if point != "in append":
            return
        self.good -= 1
        if self.good < 0 and self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [3, *(pytest.param(write, marks=pytest.mark.slow) for write in (4, 6, 7))])
def test_a_journal_without_room_pauses_the_run_until_there_is_some(
    tmp_path: Path, write: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(write, 2)
    server = Server(settings(), START, folder=tmp_path / "run", inject=disk)
    learners = both()
    with caplog.at_level(logging.WARNING), server.opened() as run:
        ScriptedNode(InProcessLink(run.service), learners).work()
        assert run.runtime.wait(60)
    assert disk.left == 0
    assert "the run pauses until its journal can be written" in caplog.text
    assert "the journal can be written again" in caplog.text
    assert [here.base for here in server.history] == undisturbed(tmp_path)
    assert [learner.steps for learner in learners.values()] == [6, 6]


@pytest.mark.parametrize("where", ["rounds", "blobs"])
def test_rounds_and_blobs_without_room_wait_for_it(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, real = [0], HashedFile.write

    def write(self: HashedFile, data: bytes | memoryview) -> None:
        if left[0] and f"/run/{where}/" in str(self._file.name):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    server = Server(settings(), START, folder=tmp_path / "run")
    monkeypatch.setattr(HashedFile, "write", write)
    learners = both()
    with caplog.at_level(logging.WARNING), server.opened() as run:
        left[0] = 2
        script = ScriptedNode(InProcessLink(run.service), learners)
        script.join()
        while not isinstance(order := script.ask(), Close):
            if isinstance(order, Fit):
                update = _patiently(lambda order=order: script.trained(order))
                assert _patiently(lambda update=update: script.send(update)).accepted
        assert run.runtime.wait(60)
    assert left == [0]
    assert [here.base for here in server.history] == undisturbed(tmp_path)


@pytest.mark.parametrize("where", ["rounds", "."])
def test_starting_a_run_waits_for_disk_space(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, real, folder = [2], os.fsync, tmp_path / "run" / where

    def fsync(file: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{file}"))
        if left[0] and (
            folder in place.parents if where != "." else place.parent == folder and "identity" in place.name
        ):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    server = Server(settings(), START, folder=tmp_path / "run")
    with caplog.at_level(logging.WARNING), server.opened() as run:
        assert left == [0]
        assert "the beginning of run run waits, and continues when there is space" in caplog.text
        ScriptedNode(InProcessLink(run.service), both()).work()
        assert run.runtime.wait(60)
    assert [here.base for here in server.history] == undisturbed(tmp_path)


def _patiently(action):  # type: ignore[no-untyped-def]
    """As a node does what a full disk on the server's side keeps it from doing."""
    from arclight.federated.errors import LinkError

    for _ in range(10):
        try:
            return action()
        except (OSError, LinkError):
            continue
    raise AssertionError("no room after ten attempts")


def test_the_order_of_arrival_and_the_transport_leave_no_trace(tmp_path: Path) -> None:
    found = set()
    for number, order in enumerate(itertools.permutations("012")):
        server = Server(settings(clients=3, strategy=FedNesterov()), START, folder=tmp_path / str(number), run="run")
        learners = {name: Quadratic(float(name) - 0.7, samples=int(name) + 3) for name in "012"}
        with server.opened() as run, HttpServer(run.service, None, run.blobs) as http:
            over_http = number % 2 == 1
            nodes = {
                name: ScriptedNode(
                    HttpLink(http.address, tmp_path / f"{number}{name}") if over_http else InProcessLink(run.service),
                    {name: learners[name]},
                    name=f"node {name}",
                )
                for name in order
            }
            for script in nodes.values():
                script.join()
            for _ in range(2):
                updates = {name: script.trained(_fit(script)) for name, script in nodes.items()}
                for name in order:
                    assert nodes[name].send(updates[name]).accepted
            assert run.runtime.wait(60)
        found.add(server.history[-1].base)
    assert len(found) == 1


def _fit(script: ScriptedNode) -> Fit:
    while not isinstance(order := script.ask(), Fit):
        assert isinstance(order, Wait), order
    return order


def test_a_second_process_of_one_name_waits_and_the_first_goes_on(tmp_path: Path) -> None:
    server = Server(settings(), START, folder=tmp_path / "run")
    with server.opened() as run:
        link = InProcessLink(run.service)
        first, second = ScriptedNode(link, both()), ScriptedNode(link, both())
        first.join()
        order = first.ask()
        assert isinstance(order, Fit)
        answer = link.send(Join(node=second.name, clients=second.clients, process="another"))
        assert isinstance(answer, Wait)
        assert "another process" in answer.waiting_for
        told = link.send(WorkRequest(node=second.name, session="made up", hold_s=0.0))
        assert isinstance(told, Receipt)
        assert told.reason == "session"
        assert first.send(first.trained(order)).accepted
        first.work()
        assert run.runtime.wait(60)
    assert [here.base for here in server.history] == undisturbed(tmp_path)


def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    server, second = (Server(settings(), START, folder=tmp_path / "run") for _ in range(2))
    with server.opened(), pytest.raises(Exception, match="in use by another process"), second.opened():
        pass


def test_work_requests_and_heartbeats_are_answered_during_aggregation(tmp_path: Path) -> None:
    going, folded = threading.Event(), threading.Event()

    def evaluate(weights: object) -> dict[str, float]:
        going.set()
        assert folded.wait(60)
        return {"val/loss": 1.0}

    server = Server(settings(), START, folder=tmp_path / "run", evaluate=evaluate)
    with server.opened() as run:
        script = ScriptedNode(InProcessLink(run.service), both())
        script.join()
        assert going.wait(60)  # the worker is at the weights that the run begins with
        order = script.ask(wait=1.0)
        assert isinstance(order, Fit)
        assert script.send(script.trained(order)).accepted
        folded.set()
        script.work()
        assert run.runtime.wait(60)


def test_a_work_request_held_during_a_suspension_of_the_server_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed, answers = time.monotonic, [0.0], list[Message]()
    server = Server(settings(rounds=1), START, folder=tmp_path / "run")
    with server.opened() as run:
        monkeypatch.setattr("arclight.federated.server.runtime.time.monotonic", lambda: real() + passed[0])
        script = ScriptedNode(InProcessLink(run.service), both())
        script.join()
        orders = [order for order in (script.ask(), script.ask()) if isinstance(order, Fit)]
        held = threading.Thread(target=lambda: answers.append(script.ask(having=orders)))
        held.start()
        wait_until(lambda: run.coordinator.cluster.held_requests, "the ask is held")
        with run.runtime._lock:
            passed[0] = 55.0  # longer than an ask is held, and answers are waited for
            run.runtime._lock.notify_all()
        for order in orders:
            assert script.send(script.trained(order)).accepted
        held.join(60)
        assert run.runtime.wait(60)
    assert [type(answer) for answer in answers] == [Close]


def with_alarm(at: float, *, silent: bool) -> Runtime:
    """A runtime whose coordinator waits for one alarm. silent: a node would be lost then."""
    cluster = SimpleNamespace(awaits_nodes=lambda now: silent)
    coordinator = SimpleNamespace(next_alarm=lambda: at, settings=SimpleNamespace(waiting=CALM), cluster=cluster)
    quiet = {name: lambda what: None for name in ("after", "on_record", "on_command")}
    return Runtime(coordinator, None, lambda task: task, **quiet)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("silent", [True, False])
def test_only_nodes_that_would_be_lost_get_a_whole_silence_after_a_standstill(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """With heartbeats of 20 s, a minute: too long for a round's grace that a slow disk has delayed a little."""
    runtime = with_alarm(100.0, silent=silent)
    monkeypatch.setattr("arclight.federated.server.runtime.time.monotonic", lambda: 100.3)
    runtime._compensate_for_stall()
    more = CALM.silence_s if silent else CALM.heartbeat_interval_s
    assert runtime.now() == pytest.approx(100.0 - more)


def test_silent_nodes_are_awaited_and_lost_ones_are_not(tmp_path: Path) -> None:
    server = Server(settings(), START, folder=tmp_path / "run")
    with server.opened() as run:
        cluster = run.coordinator.cluster
        assert not cluster.awaits_nodes(1e9)
        ScriptedNode(InProcessLink(run.service), both()).join()
        (node,) = cluster.sessions.values()
        assert not cluster.awaits_nodes(node.last_contact + 0.9 * CALM.silence_s)
        assert cluster.awaits_nodes(node.last_contact + CALM.silence_s)
        node.lost = node.last_contact
        assert not cluster.awaits_nodes(node.last_contact + CALM.silence_s)


def test_a_machine_that_is_always_late_loses_its_nodes_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standstills are compensated, also one soon after the other, and time goes on all the same."""
    passed, silence = [0.0], CALM.silence_s
    monkeypatch.setattr("arclight.federated.server.runtime.time.monotonic", lambda: passed[0])
    runtime, compensated = with_alarm(100.0, silent=True), 0
    while compensated < 1000:
        passed[0] += 100.0 - runtime.now() + 0.9 * silence
        runtime._compensate_for_stall()
        if runtime.now() >= 100.0:
            break
        assert runtime.now() == pytest.approx(100.0 - silence)
        compensated += 1
    assert 3 <= compensated < 100


def test_a_decision_that_cannot_be_followed_stops_the_server_at_once_and_the_journal_stays_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [1], Coordinator.apply

    def apply(coordinator: Coordinator, decision: Decision) -> None:
        if left[0] and any(isinstance(record, UpdateAccepted) for record in decision.records):
            left[0] -= 1
            raise ZeroDivisionError("a speed of nothing")
        real(coordinator, decision)

    monkeypatch.setattr(Coordinator, "apply", apply)
    with Server(settings(), START, folder=tmp_path / "run").opened() as run:
        script = ScriptedNode(InProcessLink(run.service), both())
        with pytest.raises(
            BrokenError, match=r"UpdateValidated is in the journal .*ZeroDivisionError: a speed of nothing"
        ):
            script.work()
        with pytest.raises(BrokenError):
            run.wait(10)
        with pytest.raises(BrokenError):
            script.ask()
    server = Server(settings(), folder=tmp_path / "run")
    with server.opened() as run:
        ScriptedNode(InProcessLink(run.service), both()).work()
        assert run.runtime.wait(60)
    assert [here.base for here in server.history] == undisturbed(tmp_path)


def test_a_server_that_was_started_again_ends_when_the_nodes_of_all_clients_have_heard(tmp_path: Path) -> None:
    with Server(settings(), START, folder=tmp_path / "run").opened():
        pass
    with Server(settings(), folder=tmp_path / "run").opened() as run:
        script = ScriptedNode(InProcessLink(run.service), both())
        script.work()
        assert run.runtime.wait(60)
        script.send(Leave(node=script.name, session=script.session))
        began = time.monotonic()
        run.notify_nodes(LIMIT)
        assert time.monotonic() - began < LIMIT / 2, "it waits for nodes that have heard"


def test_a_server_whose_run_was_over_at_its_start_ends_when_nodes_were_refused(tmp_path: Path) -> None:
    """A node that lost the session of the process before learns it when it joins again."""
    with Server(settings(), START, folder=tmp_path / "run").opened() as run:
        ScriptedNode(InProcessLink(run.service), both()).work()
        assert run.runtime.wait(60)
    with Server(settings(), folder=tmp_path / "run").opened() as run:
        assert isinstance(ScriptedNode(InProcessLink(run.service), both()).join(), Close)
        began = time.monotonic()
        run.notify_nodes(LIMIT)
        assert time.monotonic() - began < LIMIT / 2, "it waits for nodes that have heard"
