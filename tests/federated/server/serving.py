"""Servers in processes of their own, which die where they are told to, and nodes that live through it."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tests import warm
from tests.federated.fakes import Quadratic
from tests.ports import free_port

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.rounds.history import read_history
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.settings import Listening

LIMIT = 120.0
"""Seconds that anything here is waited for."""


def start_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(7, 5, generator=generator), "b": torch.randn(9, generator=generator).to(torch.bfloat16)}


def serve(settings: Federation, folder: Path, port: int, used: list[tuple[int, str]], told: Any) -> None:
    """A process: serve the run to its end, or die at the first point of a journal write that is not among ``used``."""

    def inject(point: str, line: int) -> None:
        if used is not None and (line, point) not in used:
            told.send(("killed", (line, point)))
            os.kill(os.getpid(), signal.SIGKILL)

    logging.basicConfig(filename=folder.with_name("server.log"), level=logging.INFO)
    began = time.monotonic()
    weights = start_weights()
    if settings.streaming is not None:  # fragments are dealt by blocks
        weights = {f"blocks.{number}.{name}": value for number, (name, value) in enumerate(weights.items())}
    server = Server(settings, weights, folder=folder, inject=inject if used is not None else None)
    server.serve(Listening(port=port), ready=lambda http: told.send(("ready", time.monotonic() - began)))
    told.send(("done", None))


@dataclass
class Servers:
    """One server process after another for the same run."""

    settings: Federation
    folder: Path
    port: int = field(default_factory=free_port)
    ready: list[float] = field(default_factory=list)
    """Seconds from the start of `Server` to the first answer, of each process."""

    def start(self, used: list[tuple[int, str]] | None) -> tuple[BaseProcess, Any]:
        ours, theirs = mp.Pipe(duplex=False)
        process = warm.context().Process(
            target=serve, args=(self.settings, self.folder, self.port, used, theirs), daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def through(self, used: list[tuple[int, str]] | None) -> tuple[int, str] | None:
        """Run a server till it ends; the point at which it was killed, None where it came to the end of the run."""
        process, told = self.start(used)
        killed = None
        until = time.monotonic() + LIMIT
        while told.poll(max(0.0, until - time.monotonic())):
            try:
                what, value = told.recv()
            except EOFError:
                break
            if what == "ready":
                self.ready.append(value)
            elif what == "killed":
                killed = (value[0], value[1])
        process.join(max(0.1, until - time.monotonic()))
        assert process.exitcode is not None, f"the server has not ended within {LIMIT} s"
        assert process.exitcode == (0 if killed is None else -signal.SIGKILL), process.exitcode
        return killed


@dataclass
class Nodes:
    """Nodes in threads, each with its clients, that work for whoever listens on a port."""

    folder: Path
    port: int
    learners: Mapping[str, Mapping[str, Quadratic]]
    """Node to its clients."""
    nodes: list[Node] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Nodes:
        self._threads = []
        for name, clients in self.learners.items():
            link = HttpLink(f"http://127.0.0.1:{self.port}", self.folder / name / "cache", retry_timeout_s=LIMIT)
            made = [Client(client, learner=lambda _, learner=learner: learner) for client, learner in clients.items()]
            node = Node(link, made, self.folder / name, name, retry_timeout_s=LIMIT, hold_s=5.0)
            self.nodes.append(node)
            self._threads.append(threading.Thread(target=self._run, args=(node,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def _run(self, node: Node) -> None:
        try:
            node.run()
        except BaseException as error:
            logging.getLogger(__name__).exception("node %s has ended", node.name)
            self.errors.append(error)

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a node has not ended"


def outcome(folder: Path) -> dict[str, Any]:
    """Return the outcome of a run: the digest of every round's weights, and the contributors."""
    rounds = read_history(folder)
    return {str(here["round"]): (here["base"], here["contributors"], here["steps"]) for here in rounds}
