"""Nodes against a server in the same process: rounds, evaluation, errors, cancelling, restarts, sessions that are lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.clients.sites import Net, Rows, centralised, weights_of
from tests.federated.fakes import AveragingServer, run_node

from arclight import Callback
from arclight.checkpoint import files
from arclight.federated.blobs import folder
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients.client import Client
from arclight.federated.clients.client_store import Residuals
from arclight.federated.clients.executor import InProcessExecutor
from arclight.federated.clients.node import Node
from arclight.federated.errors import FederatedError, LinkError
from arclight.federated.protocol import Failed, Join, Leave, Manifest, Message, Receipt, Update
from arclight.federated.transports.link import InProcessLink

CPU = {"accelerator": "cpu"}


def client_of(name: str, callbacks: Callback | None = None, seed: int = 5, width: int = 16) -> Client:
    torch.manual_seed(11)
    return Client(name, Net(width=width), Rows(seed=len(name)), trainer={**CPU, "callbacks": callbacks}, seed=seed)


def beginning(width: int = 16) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return weights_of(Net(width=width))


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon what may pass."""
    monkeypatch.setattr("arclight.federated.clients.node._RETRY_PAUSE_S", 0.01)


def test_one_client_over_the_whole_way_is_centralised_training(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=4, steps=7)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    torch.manual_seed(1)
    whole = Net()
    centralised(tmp_path, whole, Rows(seed=1), 28, seed=5)
    assert_equal(server.weights, weights_of(whole))
    assert isinstance(server.received[0], Join)
    assert isinstance(server.received[-1], Leave)
    assert not list((tmp_path / "node" / "run" / "clients" / "a" / "finished").glob("00000[123]")), (
        "committed updates go"
    )


def test_deltas_are_within_two_ulp_a_round(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=7, form="delta")
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    torch.manual_seed(1)
    whole = Net()
    centralised(tmp_path, whole, Rows(seed=1), 7, seed=5)
    begin, central = beginning(), weights_of(whole)
    for key, value in server.weights.items():
        # an ulp of the larger of the weights that the difference is taken between
        size = torch.maximum(begin[key].abs(), central[key].abs())
        ulp = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
        assert ((value - central[key]).abs() <= 2 * ulp).all(), key


def test_several_clients_do_not_disturb_each_other(tmp_path: Path) -> None:
    """On one node or on three, it is the same run."""
    names = ("a", "bb", "ccc")
    together = AveragingServer(tmp_path / "s1", beginning(), names, rounds=3, steps=4, form="delta", evaluate=True)
    run_node(Node(InProcessLink(together), [client_of(name) for name in names], tmp_path / "node", "n"))
    apart = AveragingServer(tmp_path / "s2", beginning(), names, rounds=3, steps=4, form="delta")
    nodes = [Node(InProcessLink(apart), [client_of(name)], tmp_path / f"node-{name}", name) for name in names]
    threads = [threading.Thread(target=run_node, args=(node,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert apart.round == together.round == 4
    assert_equal(apart.weights, together.weights)
    assert {number: sorted(by) for number, by in together.measured.items()} == {r: list(names) for r in range(1, 5)}
    losses = [sum(each.metrics["val/loss"] for each in together.measured[r].values()) for r in range(1, 5)]
    assert losses[3] < losses[0]
    assert all(update.samples == 16 and update.metrics["train/loss"] > 0 for update in together.of(Update))


@pytest.mark.parametrize("checkpoint_every_steps", [50, pytest.param(0, marks=pytest.mark.slow)])
def test_clients_that_do_not_fit_into_memory_go_on_from_the_disk(tmp_path: Path, checkpoint_every_steps: int) -> None:
    """Those whose progress is not saved stay in memory."""
    names, order = (
        ("a", "bb", "ccc"),
        {"rounds": 3, "steps": 4, "form": "delta", "checkpoint_every_steps": checkpoint_every_steps},
    )
    servers = [AveragingServer(tmp_path / f"server-{i}", beginning(), names, **order) for i in range(2)]
    for number, (server, resident) in enumerate(zip(servers, (None, 1), strict=True)):
        executor = InProcessExecutor([client_of(name) for name in names], resident=resident)
        run_node(Node(InProcessLink(server), executor, tmp_path / f"node-{number}", "n"))
    assert_equal(servers[0].weights, servers[1].weights)


class Fails(Callback):
    """Raises at a step, once."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.done, self.steps = at, error, False, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps += 1
        if trainer.global_step == self.at and not self.done:
            self.done, self.raised_at = True, time.monotonic()
            raise self.error


def test_a_failing_client_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a", "bb"), rounds=3, steps=4)
    clients = [
        client_of("a", Fails(6, torch.OutOfMemoryError("HIP out of memory. Tried to allocate 3 GiB"))),
        client_of("bb"),
    ]
    run_node(Node(InProcessLink(server), clients, tmp_path / "node", "n"))
    (failed,) = server.of(Failed)
    assert (failed.client, failed.round, failed.retryable) == ("a", 2, False)
    assert "OutOfMemoryError: HIP out of memory. Tried to allocate 3 GiB" in failed.error
    assert server.round == 4
    assert [update.client for update in server.of(Update)] == ["a", "bb", "bb", "bb"]


@pytest.mark.parametrize("step", [2, 6], ids=["before any state was saved", "later"])
def test_a_full_disk_may_be_tried_again(tmp_path: Path, step: int) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=2, steps=4)
    run_node(
        Node(
            InProcessLink(server),
            [client_of("a", Fails(step, OSError(28, "No space left on device")))],
            tmp_path / "node",
            "n",
        )
    )
    assert [failed.retryable for failed in server.of(Failed)] == [True]
    clean = AveragingServer(tmp_path / "clean", beginning(), ("a",), rounds=2, steps=4)
    run_node(Node(InProcessLink(clean), [client_of("a")], tmp_path / "other", "n"))
    assert_equal(server.weights, clean.weights)


def test_a_full_disk_has_time_to_get_room_before_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arclight.federated.clients.node._RETRY_PAUSE_S", 0.5)
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=4)
    failing, reported = Fails(2, OSError(28, "No space left on device")), list[float]()
    take = server.answer

    def answer(message: Message) -> Message:
        if isinstance(message, Failed):
            reported.append(time.monotonic())
        return take(message)

    monkeypatch.setattr(server, "answer", answer)
    run_node(Node(InProcessLink(server), [client_of("a", failing)], tmp_path / "node", "n"))
    assert len(reported) == 1
    assert reported[0] - failing.raised_at >= 0.5


def test_a_state_that_a_full_disk_did_not_take_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the checkpoint that says so, which raises an error of its own."""
    left, make_staging = [1], files.make_staging

    def full(path: Path) -> Path:
        if path.parent.name == "states" and left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return make_staging(path)

    monkeypatch.setattr(files, "make_staging", full)
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=2, steps=4)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    assert [failed.retryable for failed in server.of(Failed)] == [True]
    assert "No space left on device" in server.of(Failed)[0].error
    clean = AveragingServer(tmp_path / "clean", beginning(), ("a",), rounds=2, steps=4)
    run_node(Node(InProcessLink(clean), [client_of("a")], tmp_path / "other", "n"))
    assert_equal(server.weights, clean.weights)


def test_an_update_that_could_not_be_written_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up between training and the update's last byte; what had been left unsaid before is not lost."""
    order: dict[str, Any] = {"form": "delta", "codec": {"kind": "int8", "block": 32}}
    clean = AveragingServer(tmp_path / "clean", beginning(256), ("a",), rounds=3, steps=4, **order)
    run_node(Node(InProcessLink(clean), [client_of("a", width=256)], tmp_path / "other", "n"))
    server = AveragingServer(tmp_path / "server", beginning(256), ("a",), rounds=3, steps=4, **order)
    left, save = [1], Residuals.save

    def full(folder: Path, residuals: Any) -> None:
        if server.round == 2 and left:
            left.pop()
            raise OSError(28, "No space left on device")
        save(folder, residuals)

    monkeypatch.setattr(Residuals, "save", staticmethod(full))
    counting = Fails(10_000, RuntimeError())
    run_node(Node(InProcessLink(server), [client_of("a", counting, width=256)], tmp_path / "node", "n"))
    assert [(failed.round, failed.retryable) for failed in server.of(Failed)] == [(2, True)]
    assert counting.steps == 12
    assert_equal(server.weights, clean.weights)


@pytest.mark.parametrize("call", ["mkdir", "write_text"])
def test_a_receipt_that_could_not_be_written_keeps_the_residuals_of_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The disk fills up between the server's receipt and its record: what the update left unsaid goes into the next one, and once."""
    order: dict[str, Any] = {"form": "delta", "codec": {"kind": "int8", "block": 32}}
    clean = AveragingServer(tmp_path / "clean", beginning(256), ("a",), rounds=3, steps=4, **order)
    run_node(Node(InProcessLink(clean), [client_of("a", width=256)], tmp_path / "other", "n"))
    server, left = AveragingServer(tmp_path / "server", beginning(256), ("a",), rounds=3, steps=4, **order), [2]
    real = getattr(Path, call)

    def full(self: Path, *args: Any, **more: Any) -> Any:
        is_record = self.name == "taken" or self.parent.name == "residuals"
        if is_record and (tmp_path / "node") in self.parents and len(server.of(Update)) == 2 and left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return real(self, *args, **more)

    monkeypatch.setattr(Path, call, full)
    run_node(Node(InProcessLink(server), [client_of("a", width=256)], tmp_path / "node", "n"))
    assert left == [0]
    assert server.of(Failed) == []
    assert len(server.of(Update)) == 3
    assert_equal(server.weights, clean.weights)


def test_a_refused_update_is_logged_and_not_sent_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a", "bb"), rounds=2, steps=4)
    server.on_update = lambda update: (
        Receipt(accepted=False, reason="not_finite", message="net.0.weight is NaN") if update.client == "a" else None
    )
    run_node(Node(InProcessLink(server), [client_of("a"), client_of("bb")], tmp_path / "node", "n"))
    assert [update.client for update in server.of(Update)] == ["a", "bb", "bb"]
    assert "refuses the update of a, round 1 (not_finite): net.0.weight is NaN" in caplog.text


def test_updates_replaced_by_another_process_leave_residuals_unchanged(tmp_path: Path) -> None:
    """Somebody else's update of the client was taken: what this one's left unsaid belongs to values that never counted."""
    server = AveragingServer(
        tmp_path / "server",
        beginning(256),
        ("a",),
        rounds=2,
        steps=4,
        form="delta",
        codec={"kind": "int8", "block": 32},
    )
    residuals, kept = Residuals(tmp_path / "node" / "run" / "clients" / "a" / "residuals" / "0"), []

    def answer(update: Update) -> Receipt | None:
        if update.round == 1:
            return None
        kept.append(residuals.load(2))
        return Receipt(accepted=False, reason="duplicate", message="another update was taken already")

    server.on_update = answer
    run_node(Node(InProcessLink(server), [client_of("a", width=256)], tmp_path / "node", "n"))
    assert len(kept) == 1
    assert any(bool(left.any()) for left in kept[0].values()), "round 1 has left something"
    assert_equal(residuals.load(3), kept[0])


def test_a_damaged_update_is_sent_again(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=4)
    answers = [Receipt(accepted=False, reason="damaged", message="half of it"), None]
    server.on_update = lambda update: answers.pop(0)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    assert server.round == 2
    assert len(server.of(Update)) == 2


def test_a_server_without_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.federated.clients.session._RETRY_PAUSE_S", 0.01)
    server, left = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=4), [5]
    adopt = server.blobs.adopt

    def full(digest: str, path: Path) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        adopt(digest, path)

    monkeypatch.setattr(server.blobs, "adopt", full)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    assert left == [0]
    assert server.of(Failed) == []
    assert server.round == 2


def test_an_update_that_is_lost_here_is_made_again_and_the_node_goes_on(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a", "bb"), rounds=2, steps=4)

    def lose(update: Update) -> Receipt | None:
        if update.client == "bb" or len(server.of(Failed)) or update.round > 1:
            return None
        for digest in update.manifest.blobs:
            server.blobs.remove(digest)
            (tmp_path / "node" / "run" / "clients" / "a" / "finished" / "000001" / "blobs" / digest).unlink()
        return Receipt(accepted=False, reason="damaged", message="half of it")

    server.on_update = lose
    run_node(Node(InProcessLink(server), [client_of("a"), client_of("bb")], tmp_path / "node", "n"))
    assert [(failed.client, failed.retryable) for failed in server.of(Failed)] == [("a", True)]
    clean = AveragingServer(tmp_path / "clean", beginning(), ("a", "bb"), rounds=2, steps=4)
    run_node(Node(InProcessLink(clean), [client_of("a"), client_of("bb")], tmp_path / "other", "n"))
    assert_equal(server.weights, clean.weights)


def test_a_lost_session_costs_no_work(tmp_path: Path) -> None:
    """The server forgets the node while it trains: the node joins again, says what it has, and its update counts."""
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=2, steps=6)

    class Forget(Callback):
        steps = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.steps += 1
            if self.steps == 3:
                server.sessions.clear()
                wait_until(lambda: len(server.sessions) == 1)

    counting = Forget()
    run_node(Node(InProcessLink(server), [client_of("a", counting)], tmp_path / "node", "n"))
    assert counting.steps == 12
    first, second = server.of(Join)
    assert first.held == ()
    assert [(held.client, held.round, held.finished) for held in second.held] == [("a", 1, False)]
    assert server.round == 3


def wait_until(condition: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_cancelled_work_is_stopped(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a", "bb"), rounds=1, steps=4)

    class Slow(Callback):
        steps = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                server.cancel = ("a",)
                server.clients = ("bb",)
            time.sleep(0.1 if self.steps < 50 else 0)

    slow = Slow()
    server.order = {"checkpoint_every_steps": 0}
    server.steps = 100
    run_node(Node(InProcessLink(server), [client_of("a", slow), client_of("bb")], tmp_path / "node", "n"))
    assert slow.steps < 50
    assert [update.client for update in server.of(Update)] == ["bb"]
    assert not server.of(Failed)


def test_a_deadline_ends_a_round(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=10_000, deadline_s=0.3)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    (failed,) = server.of(Failed)
    assert "round 1 has run out of time after" in failed.error


@pytest.mark.parametrize(
    ("codec", "power"),
    [
        ({"kind": "int8", "block": 32}, True),
        *(
            pytest.param(codec, power, marks=pytest.mark.slow)
            for codec, power in (
                ({"kind": "int8", "block": 32}, False),
                ({"kind": "raw"}, True),
                ({"kind": "raw"}, False),
            )
        ),
    ],
)
def test_a_stopped_node_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: dict[str, Any], power: bool
) -> None:
    """Broken off in a round's middle, and again between an update and its receipt: the end has the bits of an undisturbed run.

    power: the second time by a power failure, which loses what has not waited for the disk.
    """
    torch.manual_seed(1)
    order: dict[str, Any] = {"form": "delta", "codec": codec, "checkpoint_every_steps": 3}
    begin = beginning(width=256)
    clean = AveragingServer(tmp_path / "clean", begin, ("a",), rounds=3, steps=8, **order)
    run_node(Node(InProcessLink(clean), [client_of("a", width=256)], tmp_path / "undisturbed", "n"))

    server = AveragingServer(tmp_path / "server", begin, ("a",), rounds=3, steps=8, **order)
    nodes: list[Node] = []

    class Stop(Callback):
        def __init__(self, at: int) -> None:
            self.at, self.steps = at, 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.steps += 1
            if trainer.global_step == self.at:
                nodes[-1].stop()

    counts = [Stop(13), Stop(10_000), Stop(10_000)]
    nodes.append(Node(InProcessLink(server), [client_of("a", counts[0], width=256)], tmp_path / "node", "n"))
    run_node(nodes[0])
    assert server.round == 2
    server.on_update = lambda update: nodes[-1].stop() or Receipt(accepted=False, reason="session", message="gone")
    nodes.append(Node(InProcessLink(server), [client_of("a", counts[1], width=256)], tmp_path / "node", "n"))
    run_node(nodes[1])
    assert server.round == 2
    assert counts[1].steps == 16 - 8 - 3, "the journal had three of the round's steps"
    server.on_update = lambda update: None
    if power:
        monkeypatch.setattr(folder, "running_since", lambda: "another time")
        (finished,) = (tmp_path / "node" / "run" / "clients" / "a" / "finished").iterdir()
        for lost in () if codec["kind"] == "int8" else FolderStore(finished / "blobs"):
            (finished / "blobs" / lost).unlink()  # the server's is the same file here
            (finished / "blobs" / lost).write_bytes(bytes(100))
    nodes.append(Node(InProcessLink(server), [client_of("a", counts[2], width=256)], tmp_path / "node", "n"))
    run_node(nodes[2])
    assert counts[2].steps == 8, "what was finished is sent, not trained again"
    assert server.round == 4
    assert_equal(server.weights, clean.weights)
    assert (tmp_path / "node" / "run" / "clients" / "a" / "residuals" / "0").exists() == (codec["kind"] == "int8")


@pytest.mark.parametrize(
    ("counts", "restarted"),
    [
        (True, True),
        (False, False),
        *(pytest.param(counts, not counts, marks=pytest.mark.slow) for counts in (True, False)),
    ],
)
def test_residuals_of_an_update_the_server_lost_are_dropped(tmp_path: Path, counts: bool, restarted: bool) -> None:
    """A power failure took the server's copy, and the round was closed without it; or the server has only been started again."""
    order: dict[str, Any] = {"form": "delta", "codec": {"kind": "int8", "block": 32}, "checkpoint_every_steps": 3}
    begin, reasons = beginning(width=256), list[str]()

    def refused(name: str) -> Manifest:
        """Return the manifest of round 2 if that of round 1 was refused, or accepted, at once."""
        server = AveragingServer(tmp_path / name, begin, ("a", "b"), rounds=2, steps=4, **order)

        def first(update: Update) -> Receipt | None:
            if update.round == 1:
                go_on(server)
            return None if update.round == 2 else Receipt(accepted=counts, reason="stale", message="", committed=1)

        server.on_update = first
        node = Node(InProcessLink(server), [client_of("a", width=256)], tmp_path / f"node {name}", "n")
        run_until(node, lambda: 2 in {update.round for update in server.of(Update)})
        return next(update.manifest for update in server.of(Update) if update.round == 2)

    server = AveragingServer(tmp_path / "server", begin, ("a", "b"), rounds=2, steps=4, **order)

    def again(update: Update) -> Receipt | None:
        if update.round == 1 and server.round == 2:
            reasons.append("asked")
            return Receipt(accepted=counts, reason="stale", message="the round is closed", committed=1)
        return None

    server.on_update = again
    node = Node(InProcessLink(server), [client_of("a", width=256)], tmp_path / "node", "n")

    def lost() -> bool:
        if (tmp_path / "node/run/clients/a/finished/000001/taken").exists() and server.round == 1:
            if restarted:
                return True
            with server.lock:
                go_on(server)
                server.sessions.clear()
        return 2 in {update.round for update in server.of(Update)}

    run_until(node, lost)
    if restarted:
        go_on(server)
        run_until(Node(InProcessLink(server), [client_of("a", width=256)], tmp_path / "node", "n"), lost)
    assert reasons
    (second,) = (update.manifest for update in server.of(Update) if update.round == 2)
    assert second == refused("other")


def go_on(server: AveragingServer) -> None:
    """Without what has come."""
    with server.lock:
        server.round += 1
        server._offer()


def run_until(node: Node, true: Callable[[], bool]) -> None:
    thread = threading.Thread(target=node.run)
    thread.start()
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)
    node.stop()
    thread.join(60)
    assert not thread.is_alive()


class Away:
    """A link whose server comes back after some attempts, or never."""

    def __init__(self, link: InProcessLink, attempts: int) -> None:
        self.link, self.blobs, self.left = link, link.blobs, attempts

    def send(self, message: Message) -> Message:
        if isinstance(message, Update) and self.left > 0:
            self.left -= 1
            raise LinkError("nobody answers at 10.0.0.1:8080")
        return self.link.send(message)

    def cancel_on(self, stopping: threading.Event) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=4)
    run_node(Node(Away(InProcessLink(server), 1), [client_of("a")], tmp_path / "node", "n"))
    assert server.round == 2
    again = AveragingServer(tmp_path / "again", beginning(), ("a",), rounds=1, steps=4)
    node = Node(Away(InProcessLink(again), 10**6), [client_of("a")], tmp_path / "other", "n", retry_timeout_s=0.5)
    with pytest.raises(
        LinkError, match=r"nobody answers at 10\.0\.0\.1:8080; tried for 0\.5 s. What the node has finished is kept"
    ):
        run_node(node)
    run_node(Node(InProcessLink(again), [client_of("a")], tmp_path / "other", "n"))
    assert again.round == 2


def test_damaged_records_are_reported_and_recreated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = AveragingServer(tmp_path / "server", beginning(), ("a",), rounds=1, steps=4)
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    file = tmp_path / "node" / "run" / "clients" / "a" / "client.json"
    assert json.loads(file.read_text())["client"] == "a"
    file.write_text(file.read_text()[:40])
    run_node(Node(InProcessLink(server), [client_of("a")], tmp_path / "node", "n"))
    assert "client.json is damaged" in caplog.text
    assert json.loads(file.read_text())["client"] == "a"


def test_clients_without_a_module_and_duplicate_names_are_refused() -> None:
    with pytest.raises(FederatedError, match="needs one of module"):
        Client("a")
    with pytest.raises(FederatedError, match="two clients have one name"):
        InProcessExecutor([client_of("a"), client_of("a")])


def test_another_run_at_the_same_address_is_joined_by_a_new_node(tmp_path: Path) -> None:
    """The server was killed and began anew, with what the node does not have: it ends in order, and leaves the new run whole."""
    first = AveragingServer(tmp_path / "first", beginning(), ("a",), rounds=3, steps=4)
    second = AveragingServer(tmp_path / "second", beginning(), ("a",), rounds=1, steps=4)
    second.run = "another"

    class Moving(InProcessLink):
        def moved(self) -> None:
            self._server, self.blobs = second, second.blobs

    link = Moving(first)

    class Begins(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            link.moved()

    node = Node(link, [client_of("a", Begins())], tmp_path / "node", "n")
    run_node(node)
    assert node.moved
    assert "another run now, another, not at run" in node.closed
    assert second.of(Leave), "the new run does not wait for it"
    assert not second.of(Failed)
    again = Node(link, [client_of("a")], tmp_path / "node", "n")
    run_node(again)
    assert not again.moved
    assert second.round == 2
