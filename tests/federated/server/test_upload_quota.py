"""Uploads of nodes are bounded by the size of their updates, and kept while they are in use."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.federated.fakes import CALM, Quadratic, ScriptedNode
from tests.waiting import wait_until

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.errors import RefusedError
from arclight.federated.protocol import Close, Fit, Heartbeat, Join
from arclight.federated.server import published_weights, service
from arclight.federated.server.published_weights import ORPHAN_S
from arclight.federated.server.server import Server
from arclight.federated.server.server_run import ServerRun
from arclight.federated.settings import Checks, Federation
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.link import InProcessLink

START = {"w": torch.linspace(-1, 1, 300_000)}
ROOM = 2 * (2 * 1_200_000 + (1 << 20))
"""Two updates, each of at most twice the weights and 1 MB."""


class Served:
    def __init__(self, run: ServerRun, http: HttpServer, folder: Path) -> None:
        self.run, self.http, self.folder, self._links = run, http, folder, list[HttpLink]()

    def link(self, name: str) -> HttpLink:
        self._links.append(HttpLink(self.http.address, self.folder / name, retry_timeout_s=2))
        return self._links[-1]

    def node(self, name: str = "n", clients: tuple[str, ...] = ("0",)) -> ScriptedNode:
        made = ScriptedNode(self.link(name), {client: Quadratic(1.0) for client in clients}, name)
        made.join()
        return made

    def on_disk(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "run" / "blobs").rglob("*") if path.is_file())

    def close(self) -> None:
        for link in self._links:
            link.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = Federation(clients=2, rounds=1, local_steps=3, evaluate_every=0, waiting=CALM)
    with Server(settings, START, folder=tmp_path / "run").opened() as run, HttpServer(run.service) as http:
        made = Served(run, http, tmp_path)
        yield made
        made.close()


def test_a_node_cannot_fill_the_disk(served: Served) -> None:
    node, before = served.node(), served.on_disk()
    for number in range(12):
        content = bytes([number]) * 1_500_000
        node.link.blobs.put(hashlib.sha256(content).hexdigest(), content)
        assert served.on_disk() - before <= ROOM
    assert node.send(node.trained(_fit(node))).accepted


def test_unfinished_blobs_of_a_node_count_against_its_quota(served: Served) -> None:
    node, before = served.node(), served.on_disk()
    statuses = []
    for number in range(12):
        line = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=60)
        headers = {"authorization": f"Bearer {node.session}", "content-range": "bytes 0-999999/1500000"}
        line.request("PUT", f"/v1/blobs/{number:064x}", bytes(1_000_000), headers)
        statuses.append(line.getresponse().status)
        line.close()
    assert statuses[:4] == [202] * 4
    assert set(statuses[4:]) == {503}, "their room is theirs until they are given up"
    assert served.on_disk() - before <= ROOM


def test_a_blob_larger_than_any_update_is_refused_before_it_is_sent(served: Served) -> None:
    node, before = served.node(), served.on_disk()
    content = bytes(ROOM + 1)
    with pytest.raises(RefusedError, match=rf"all updates of node n's clients together need {ROOM:,} at most"):
        node.link.blobs.put(hashlib.sha256(content).hexdigest(), content)
    assert served.on_disk() == before


def test_a_node_reports_an_oversized_update_and_goes_on(tmp_path: Path) -> None:
    settings = Federation(
        clients=2, rounds=1, local_steps=3, evaluate_every=0, waiting=CALM, checks=Checks(bytes_times=0.01)
    )
    server = Server(settings, {"w": torch.zeros(2_000_000)}, folder=tmp_path / "run")
    with server.opened() as run, HttpServer(run.service) as http:
        link = HttpLink(http.address, tmp_path / "cache", retry_timeout_s=5)
        clients = [Client(name, learner=lambda _: Quadratic(1.0)) for name in ("0", "1")]
        node = Node(link, clients, tmp_path / "node", "n", hold_s=1.0)
        node.run()
        link.close()
    assert "need 4,514,304 at most" in node.closed
    assert "has 8,000,080 bytes" in run.service.history.at(1).failed["0"]


def test_blobs_of_a_refused_update_go_at_once(served: Served) -> None:
    node, before = served.node(), served.on_disk()
    order = _fit(node)
    outcome = node.learners["0"].fit(order, node.weights(order.weights), lambda step, loss: None)
    update = node.packed(order, {"model/w": torch.full((300_000,), 1e30)}, outcome)
    assert served.on_disk() - before > 1_000_000
    receipt = node.send(update)
    assert (receipt.accepted, receipt.reason) == (False, "too_large")
    assert served.on_disk() - before < 10_000
    stale = node.packed(order, {"model/w": torch.full((300_000,), 2e30)}, outcome)
    assert not node.send(stale).accepted
    assert served.on_disk() - before < 10_000


def test_stored_blobs_survive_a_refused_second_upload(served: Served) -> None:
    node, other = served.node(), served.node("other", clients=("1",))
    order = _fit(node)
    update = node.trained(order)
    assert node.send(update).accepted
    (base, *_), (taken, *_) = order.weights.blobs, update.manifest.blobs
    for digest in (base, taken):  # as what went wrong on the way may be said again
        content = b"".join(served.run.blobs.read(digest))
        line = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=60)
        line.request("PUT", f"/v1/blobs/{digest}", content, {"authorization": f"Bearer {other.session}"})
        assert line.getresponse().status == 200
        line.close()
    stolen = replace(other.trained(_fit(other)), manifest=update.manifest, samples=0)
    assert not other.send(stolen).accepted
    assert not other.send(replace(stolen, manifest=replace(order.weights, kind="update"))).accepted
    assert served.run.blobs.size(base) is not None
    assert served.run.blobs.size(taken) is not None


def test_the_first_blobs_of_a_slow_update_wait_for_the_last(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    node = served.node(clients=("0", "1"))
    gone, here = b"whose node has gone" * 1000, b"of a node that goes on" * 1000
    names = {content: hashlib.sha256(content).hexdigest() for content in (gone, here)}
    other = served.node("other", clients=("0",))
    other.link.blobs.put(names[gone], gone)
    node.link.blobs.put(names[here], here)
    for name in names.values():  # all of it was here long ago
        path = served.folder / "run" / "blobs" / name
        os.utime(path, (0, 0))
    monkeypatch.setattr(published_weights, "ORPHAN_S", 0.0)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * ORPHAN_S)
    monkeypatch.setattr(service, "time", later)  # nobody has uploaded anything for so long
    part = bytes(1000)
    line = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=60)
    headers = {"authorization": f"Bearer {node.session}", "content-range": "bytes 0-999/2000"}
    line.request("PUT", f"/v1/blobs/{1:064x}", part, headers)
    assert line.getresponse().status == 202
    line.close()
    assert isinstance(node.work(), Close)
    assert served.run.runtime.wait(60)
    _until_tidy(served, names[gone])
    assert served.run.blobs.size(names[here]) == len(here)


def _until_tidy(served: Served, digest: str) -> None:
    wait_until(lambda: served.run.blobs.size(digest) is None, "what a node has left is deleted")


def test_messages_are_as_large_as_they_need_to_be(served: Served) -> None:
    node = served.node()

    def send(size: int, token: str) -> tuple[int, str]:
        line = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=60)
        line.request("POST", "/v1/message", b" " * size, {"authorization": f"Bearer {token}"} if token else {})
        answer = line.getresponse()
        said = answer.status, str(json.loads(answer.read())["error"])
        line.close()
        return said

    assert send((256 << 10) + 1, "") == (
        413,
        "a message of 262145 bytes is larger than the 262144 that this server takes",
    )
    assert send(256 << 10, "")[0] == 400
    assert send(2 << 20, node.session)[0] == 413
    assert send(1 << 20, node.session)[0] == 400


def test_names_and_values_that_would_fill_the_journal(served: Served) -> None:
    with pytest.raises(Exception, match="at most 200 characters, got 300"):
        served.link("long").send(Join(node="n" * 300, clients=("0",)))
    node = served.node()
    order = _fit(node)
    update = node.trained(order)
    update.metrics.update({f"value {n}": 1.0 for n in range(1001)})
    receipt = node.send(update)
    assert "logs 1,002 values: 1,000 are taken" in receipt.message
    assert node.send(Heartbeat(node="n", session=node.session)).accepted


def test_a_client_that_is_named_twice_does_not_raise_a_nodes_quota(served: Served) -> None:
    with pytest.raises(Exception, match="names a client twice"):
        served.link("n").send(Join(node="n", clients=("0",) * 1000))


def test_blobs_shared_with_a_finished_update_are_not_removed(tmp_path: Path) -> None:
    """The second is taken just while what the first has left is looked for."""
    accepted, asked = threading.Event(), list[set[str]]()
    server = Server(
        Federation(clients=1, rounds=2, local_steps=3, evaluate_every=0, waiting=CALM), START, folder=tmp_path / "run"
    )
    with server.opened() as run:
        spooled = run.runtime.spooled

        def slowly() -> set[str]:
            asked.append(spooled())
            assert accepted.wait(20)
            return asked[-1]

        run.runtime.spooled = slowly  # type: ignore[method-assign]
        node = ScriptedNode(InProcessLink(run.service), {"0": Quadratic(1.0)})
        node.join()
        for number in (1, 2):
            order = _fit(node)
            outcome = node.learners["0"].fit(order, START, lambda step, loss: None)
            while number == 2 and not asked:
                time.sleep(0.01)
            assert node.send(node.packed(order, {"model/w": torch.zeros(300_000)}, outcome)).accepted
        accepted.set()
        assert run.runtime.wait(20)
    assert [here.contributors for here in server.history] == [[], ["0"], ["0"]]


def test_sessions_that_are_gone_are_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.federated.server.service._SESSIONS", 3)
    node = served.node()
    for _ in range(6):
        node.join()
        order = _fit(node)
    assert len(served.run.service._sent) == 3
    assert served.run.service.history.sent_down(1) == 6 * order.weights.size, "each session fetches all"
    assert node.send(node.trained(order)).accepted


def _fit(node: ScriptedNode) -> Fit:
    order = node.ask()
    assert isinstance(order, Fit), order
    return order


def test_upload_limits_are_computed_once_for_the_same_weights(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("largest_message", "most_bytes"):
        real = getattr(service, name)
        monkeypatch.setattr(service, name, lambda *given, real=real: calls.append(real) or real(*given))
    node = served.node()
    for _ in range(3):
        node.send(Heartbeat(node="n", session=node.session))
    node.link.blobs.put(hashlib.sha256(b"x").hexdigest(), b"x")
    assert served.run.service.largest_message > 1 << 20
    assert len(calls) <= 2
