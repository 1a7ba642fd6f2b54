"""Define the public ``Server``: initial weights, a run folder, clients here or over HTTP.

Users make a `Server`. `Server.run` trains clients in this process, `Server.serve` answers nodes over HTTP (`transports.server_process` calls
it, for Flower), and `Server.opened` yields the `ServerRun` to a caller's own transport (``arclight federate``, `simulation.server_costs`).
Arguments are public and stay.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight import checkpoint
from arclight.fabric.seeding import generators_lock
from arclight.federated.coordination import events
from arclight.federated.coordination import records as r
from arclight.federated.coordination.run_database import Injection
from arclight.federated.errors import FederatedError
from arclight.federated.rounds.history import Round, read_rounds
from arclight.federated.rounds.initial_weights import entries_in, entries_of, moments_of, statistics, steps_of
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.server_run import InitialState, Measurement, ServerRun
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink
from arclight.trainer.checkpoint.named_state import named_tensors

if TYPE_CHECKING:
    from torch import nn

    from arclight.federated.clients.client import Client
    from arclight.federated.transports.http_server import HttpServer
    from arclight.federated.transports.settings import Listening

log = logging.getLogger(__name__)

Weights = Mapping[str, torch.Tensor]
RecordOrCommand = events.Command | r.Record
Evaluate = Callable[[Weights], Measurement | Mapping[str, float]]


class Server:
    """One federated run, on the server's side.

    weights: what it begins with: a module, tensors by parameter name, or the path of a checkpoint of a centralised run (whose
    averaged weights are taken if it has some, and its optimizer's states for the federation's moments). Neither used nor needed if the run is resumed.
    folder: the run's own. A run that was stopped, killed or failed in it goes on from its newest round and the updates that had
    come since; another run's folder is refused.
    clients: their names; by default "0", "1", ... as many as ``federation.clients``.
    evaluate: called with the weights of a round (by parameter name); gives metrics, or how many samples and metrics.
    moments: local moments to begin with, by ``exp_avg/<parameter name>``; by default those of the checkpoint. recipe: tables that
    nodes get when they join. run: its name, by default the folder's. seed: of sampling, and of what clients draw.
    observer: called with every record and notable command, for progress; it must be quick. inject: for tests, see `Injection`.
    """

    def __init__(
        self,
        federation: Federation,
        weights: nn.Module | Weights | str | Path | None = None,
        *,
        folder: str | Path,
        clients: Sequence[str] | int | None = None,
        evaluate: Evaluate | None = None,
        moments: Weights | None = None,
        run: str | None = None,
        seed: int = 0,
        recipe: dict[str, Any] | None = None,
        observer: Callable[[RecordOrCommand], None] | None = None,
        inject: Injection | None = None,
    ) -> None:
        self.federation, self.folder, self.seed = federation, Path(folder), seed
        self.name = run or self.folder.resolve().name
        self._weights, self._moments, self._recipe, self._inject = weights, moments or {}, recipe, inject
        self._clients = clients
        self._evaluate, self._observer = evaluate, observer or (lambda what: None)
        self._run: ServerRun | None = None
        self._leaving = threading.Event()
        self.over = False
        """True once `serve` has returned because the run was over."""

    @property
    def history(self) -> list[Round]:
        """Return the history of each round so far; round 0 holds the initial weights."""
        return read_rounds(self.folder) if self._run is None else self._run.history.rounds

    @property
    def rounds(self) -> Rounds:
        """Return the run's checkpoints."""
        return Rounds(self.folder)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the newest round's weights by parameter name.

        Raises FederatedError if there is none.
        """
        newest = self.rounds.newest()
        if newest is None:
            raise FederatedError(f"{self.folder} has no complete round yet")
        return self.rounds.tensors(newest, "model")

    @contextmanager
    def opened(self) -> Iterator[ServerRun]:
        """Start or resume the run; yield it for transports to serve until the block ends.

        Raises FederatedError if the folder is another run's, in use, or damaged.
        """
        if self._run is not None:
            raise FederatedError(f"run {self.name} is open already")
        with ServerRun(
            self.folder,
            self.federation,
            self.federation.clients if self._clients is None else self._clients,
            name=self.name,
            seed=self.seed,
            start=self._start,
            evaluate=None if self._evaluate is None else self._measured,
            recipe=self._recipe,
            observer=self._observer,
            inject=self._inject,
        ) as run:
            self._run = run
            try:
                yield run
            finally:
                self._run = None

    def run(self, clients: Iterable[Client]) -> list[Round]:
        """Train ``clients`` in this process, one after another, until the end; return the history.

        If the server was not given names, these are theirs. Raises FederatedError if the run or a client's node fails.
        """
        from arclight.federated.clients.node import Node

        mine = list(clients)
        if self._clients is None:
            if len(mine) != self.federation.clients:
                raise FederatedError(f"the federation has {self.federation.clients} clients, {len(mine)} were given")
            self._clients = [client.name for client in mine]
        with self.opened() as run:
            node = Node(InProcessLink(run.service), mine, self.folder / "node", "here")
            try:
                node.run()
            except FederatedError:
                run.wait(0.0)  # if the server has failed, that is why
                raise
            run.wait()
        return self.history

    def serve(
        self, listening: Listening | None = None, *, bound: socket.socket | None = None,
        ready: Callable[[HttpServer], None] = lambda http: None,
    ) -> list[Round]:  # fmt: skip
        """Answer nodes over HTTP, or HTTPS off loopback, until the run is over; returns its history.

        bound: a socket that listens already, in the place of one at ``listening``'s host and port. ready: called once nodes can come, with
        the server that says its address. After `leave` it returns before the run is over.

        Raises FederatedError if the run fails, AddressError (an OSError) if the address is taken.
        """
        from arclight.federated.transports.http_server import HttpServer

        try:
            with self.opened() as run, HttpServer(run.service, listening, run.blobs, bound) as http:
                log.info("run %s is served at %s", self.name, http.address)
                ready(http)
                if self._leaving.is_set():  # called before there was a run
                    run.runtime.leave()
                run.wait_for_nodes()
                self.over = run.runtime.ended is not None
        finally:
            self._leaving.clear()  # it was for this call: the next one serves again
        return self.history

    def leave(self) -> None:
        """End `serve` in order, from another thread: all is written.

        The next call of `serve` goes on with the run. Called before `serve`, it ends that one at once.
        """
        self._leaving.set()
        if (run := self._run) is not None:
            run.runtime.leave()

    def _start(self) -> InitialState:
        given, clock, moments = self._weights, 0, self._moments
        if given is None:
            return InitialState()
        if isinstance(given, torch.nn.Module):
            found: Weights = {name: tensor.detach() for name, tensor in named_tensors(given).items()}
            module = entries_of(given)
        elif isinstance(given, str | Path):
            found, clock, module = checkpoint.load_weights(given), steps_of(given), entries_in(given)
            moments = moments or moments_of(given, self.federation.moments)
        else:
            found, module = given, {}
        module.setdefault("buffers", statistics(found))
        weights = {name: tensor.detach().cpu() for name, tensor in found.items()}
        return InitialState(weights=weights, moments=moments, clock=clock, module=module)

    def _measured(self, number: int, weights: Weights) -> Measurement:
        assert self._evaluate is not None
        with generators_lock.current:  # clients may train in this process, too
            result = self._evaluate(weights)
        samples, metrics = (1, result) if isinstance(result, Mapping) else result
        found = {name: float(value) for name, value in metrics.items()}
        for name in [name for name, value in found.items() if not math.isfinite(value)]:
            log.warning("round %d: %s is %s, and is left out of the history", number, name, found.pop(name))
        return samples, found
