"""A whole run over each transport gives the same weights, bit for bit, broken lines or not."""

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import Quadratic
from tests.federated.transports.serving import Line, Serving, wait_until

from arclight.fabric.serving.certificates import make_certificate
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.keys import NodeKey
from arclight.federated.transports.link import InProcessLink, Link, ServerApi
from arclight.federated.transports.settings import Listening

CLIENTS = ("left", "middle", "right")
Links = Callable[[str], Link]


def in_process(service: ServerApi, folder: Path, stack: ExitStack) -> Links:
    return lambda node: InProcessLink(service)


def http(service: ServerApi, folder: Path, stack: ExitStack) -> Links:
    served = stack.enter_context(HttpServer(service))
    return lambda node: HttpLink(served.address, folder / node / "fetched", retry_timeout_s=30)


def https(service: ServerApi, folder: Path, stack: ExitStack) -> Links:
    made = make_certificate(folder / "keys", ["127.0.0.1"], extra="federated")
    keys = {node: NodeKey.make(folder / f"{node}.key") for node in ("a", "b")}
    nodes = folder / "nodes"
    nodes.write_text("\n".join([keys["a"].line("a", CLIENTS[:2]), keys["b"].line("b", CLIENTS[2:])]))
    listening = Listening(certificate=made.certificate, private_key=made.private_key, nodes=nodes)
    served = stack.enter_context(HttpServer(service, listening))
    return lambda node: HttpLink(
        served.address, folder / node / "fetched", key=keys[node], fingerprint=made.fingerprint, retry_timeout_s=30
    )


def http_that_breaks(service: ServerApi, folder: Path, stack: ExitStack) -> Links:
    """About every 25th chunk of what passes, whichever way, ends the connection."""
    served = stack.enter_context(HttpServer(service))
    line = Line(served.port)
    stack.callback(line.close)
    rng = random.Random(3)
    line.change = lambda up, before, chunk: None if rng.random() < 0.04 else chunk
    stack.callback(lambda: _check_broken(line))
    return lambda node: HttpLink(line.address, folder / node / "fetched", retry_timeout_s=30)


def _check_broken(line: Line) -> None:
    assert line.connections > 10, "nothing was broken"


def http_and_object_store(service: ServerApi, folder: Path, stack: ExitStack) -> Links:
    """The server tells nodes where blobs are; its own line carries none."""
    served = stack.enter_context(HttpServer(service))
    line = Line(served.port)
    stack.callback(line.close)
    stack.callback(lambda: _check_small(line))
    return lambda node: HttpLink(
        line.address, folder / node / "fetched", retry_timeout_s=30, stores=["memory://whole-run"]
    )


def _check_small(line: Line) -> None:
    assert line.connections > 0
    assert line.up + line.down < 200_000, "tensors went over the server's line"


TRANSPORTS = {
    "in process": in_process,
    "http": http,
    "https": https,
    "http that breaks": http_that_breaks,
    "object store": http_and_object_store,
}


def _learner(client: str, folder: Path) -> Quadratic:
    return Quadratic(len(client) / 3)


def server_in(folder: Path, blobs_at: str | None = None) -> Server:
    torch.manual_seed(5)
    start = {"layer.weight": torch.randn(300, 200), "layer.bias": torch.randn(300)}
    federation = Federation(clients=len(CLIENTS), rounds=4, local_steps=3, blobs_at=blobs_at)
    return Server(federation, start, folder=folder / "run", clients=CLIENTS, run="run")


def started(links: Links, folder: Path, stack: ExitStack) -> tuple[list[Node], list[threading.Thread]]:
    """Two nodes at work."""
    nodes = []
    for name, clients in (("a", CLIENTS[:2]), ("b", CLIENTS[2:])):
        learners = [Client(one, learner=partial(_learner, one)) for one in clients]
        link = links(name)
        stack.callback(link.close)
        nodes.append(Node(link, learners, folder / name, name, hold_s=2.0))
        stack.callback(nodes[-1].stop)
    threads = [threading.Thread(target=node.run) for node in nodes]
    for thread in threads:
        thread.start()
    return nodes, threads


def weights_after(folder: Path, transport: str) -> dict[str, torch.Tensor]:
    server = server_in(folder, "memory://whole-run/blobs" if transport == "object store" else None)
    with server.opened() as run, ExitStack() as stack:
        nodes, threads = started(TRANSPORTS[transport](run.service, folder, stack), folder, stack)
        run.wait()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node did not hear that the run is over"
        assert all(node.closed for node in nodes)
    assert len(server.history) == 5
    assert list((folder / "a").rglob("fetched/[0-9a-f]*")) == [], "what was fetched is kept twice"
    return server.weights()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights_after(tmp_path_factory.mktemp("expected"), "in process")


@pytest.mark.parametrize(
    "transport", [pytest.param("http", marks=pytest.mark.slow), "https", "http that breaks", "object store"]
)
def test_every_transport_gives_the_same_weights(
    transport: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    found = weights_after(tmp_path, transport)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again_ends_with_the_same_weights(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """A process of its own, killed whenever a further round is committed; the nodes here only find that it is away."""
    with ExitStack() as stack:
        line = Line(1)
        stack.callback(line.close)
        nodes, threads = started(
            lambda node: HttpLink(line.address, tmp_path / node / "fetched", retry_timeout_s=60), tmp_path, stack
        )
        rounds = Rounds(tmp_path / "run")
        for number in range(1, 5):
            served = Served(tmp_path)
            line.target = served.port
            if number < 4:
                wait_until(lambda number=number: (rounds.newest() or 0) >= number, f"round {number}", 100)  # type: ignore[misc]
                time.sleep(random.Random(number).uniform(0, 0.1))
                served.process.kill()
            assert (served.process.wait(100) == 0) == (number == 4)
            served.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a node did not hear that the run is over"
        assert all(node.closed for node in nodes)
    found = server_in(tmp_path).weights()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


class Served(Serving):
    """The server of `server_in`, in a process of its own that ends with the run."""

    module = "tests.federated.transports.test_whole_run"


if __name__ == "__main__":
    server_in(Path(sys.argv[1])).serve(ready=lambda http: print(http.address, flush=True))
