"""Our own plane without Flower: memory of the server's process, bytes on the wire, the time until a first round, digests."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arclight.federated.clients.node import Node
from arclight.federated.rounds.history import read_history
from arclight.federated.rounds.store import Rounds
from arclight.federated.transports.keys import NodeKey
from arclight.federated.transports.link import InProcessLink
from arclight.federated.transports.server_process import ServerProcess
from benchmarks import federated_sites as sites


@dataclass
class Seen:
    """What one run over HTTP showed."""

    peak: float = 0.0
    """Bytes: the most that the server's process held at once."""
    wire: int = 0
    """Bytes that went through the connections of all nodes, both ways."""
    up: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each round, opened to committed."""
    first: float = 0.0
    """Seconds from the start of server and nodes to the first fit."""
    digest: str = ""


def over_http(folder: Path, config: Mapping[str, Any], *, counted: bool = False) -> Seen:
    """A run with the server in a process of its own and all nodes in another."""
    folder.mkdir(parents=True)
    seen, began = Seen(), time.time()
    (folder / "first").mkdir()
    config = {**config, "first": str(folder / "first")}
    with (folder / "nodes.log").open("wb") as log:  # both at once, as on two machines
        nodes = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.federated_sites"], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    served = ServerProcess("benchmarks.federated_sites:server", folder / "run", config)
    keys = {str(number): folder / "keys" / f"{number}.key" for number in range(int(config["clients"]))}
    lines = [NodeKey.make(path).line(f"node-{name}") for name, path in keys.items()]
    served.nodes.write_text("".join(f"{line}\n" for line in lines))
    said = {
        "address": served.address, "keys": {name: str(path) for name, path in keys.items()}, "config": config,
        "folder": str(folder / "nodes"),
    }  # fmt: skip
    with _counting(served.address) if counted else _nothing() as relay:
        if relay is not None:
            said["relay"] = relay.address
        assert nodes.stdin is not None
        nodes.stdin.write(json.dumps(said).encode() + b"\n")
        nodes.stdin.flush()
        while not served.wait(0.05):
            seen.peak = max(seen.peak, peak_of(served.pid))
            if nodes.poll() not in (None, 0):
                raise RuntimeError(f"the nodes have failed: {(folder / 'nodes.log').read_text()[-2000:]}")
        nodes.wait(60)
        if relay is not None:
            seen.up, seen.wire = relay.up, relay.up + relay.down
    seen.seconds = round_seconds(folder / "run")
    seen.first = min(float(one.read_text()) for one in (folder / "first").iterdir()) - began
    seen.digest = digest(folder / "run")
    return seen


def round_seconds(run: Path) -> list[float]:
    """Of each round of a finished run."""
    return [one["seconds"]["round"] for one in read_history(run) if "round" in one["seconds"]]


def digest(run: Path) -> str:
    rounds = Rounds(run)
    newest = rounds.newest()
    assert newest is not None
    return rounds.weights(newest).digest


def peak_of(process: int) -> float:
    """Bytes: the most that a process has held at once, mapped files included; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)


def in_process(
    folder: Path, config: Mapping[str, Any], delays: tuple[float, ...] = ()
) -> tuple[str, float, list[float]]:
    """The same run within this process, a node for each client: digest, seconds to the first fit, seconds of rounds."""
    first = folder / "first"
    first.mkdir(parents=True)
    config, began = {**config, "first": str(first)}, time.time()
    server = sites.server(folder / "run", config)
    with server.opened() as run:
        threads = []
        for number in range(int(config["clients"])):
            own = {**config, "delay": delays[number] if delays else 0.0}
            node = Node(
                InProcessLink(run.service),
                [sites.client(str(number), own)],
                folder / f"node-{number}",
                f"node-{number}",
            )
            threads.append(threading.Thread(target=node.run, daemon=True))
            threads[-1].start()
        run.wait()
        for thread in threads:
            thread.join(60)
    start = min(float(one.read_text()) for one in first.iterdir()) - began
    return digest(folder / "run"), start, round_seconds(folder / "run")


def digests(folder: Path, *, quick: bool) -> int:
    """How many different results there are of one run over arrival orders, numbers of threads, and transports."""
    config = {"clients": 4, "rounds": 2, "megabytes": 1.0, "noise": True}
    orders = list(itertools.permutations((0.0, 0.05, 0.1, 0.15)))[:: 8 if quick else 2]
    found = set()
    for number, delays in enumerate(orders):
        threads = torch.get_num_threads()
        torch.set_num_threads(1 + number % 2)
        try:
            found.add(in_process(folder / f"order-{number}", config, delays)[0])
        finally:
            torch.set_num_threads(threads)
    found.add(over_http(folder / "http", config).digest)
    return len(found)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


class _Relay:
    """Passes bytes between nodes and the server, and counts them."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._to, self._socket = (host, int(port)), socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.up = self.down = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                node, _ = self._socket.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            for source, sink, way in ((node, server, "up"), (server, node, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 20):
                sink.sendall(data)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
        except OSError:  # the other side has closed
            pass
        finally:
            for one in (source, sink):
                one.close()

    def close(self) -> None:
        self._socket.close()


@contextmanager
def _counting(address: str) -> Iterator[_Relay]:
    relay = _Relay(address)
    try:
        yield relay
    finally:
        relay.close()
