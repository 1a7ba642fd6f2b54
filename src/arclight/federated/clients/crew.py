"""Those who train a node's clients: here, in this process; `worker` has processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from arclight.federated.clients.work import Works
from arclight.federated.errors import FederatedError

if TYPE_CHECKING:
    from arclight.federated.blobs.folder import FolderStore
    from arclight.federated.clients.client import Client
    from arclight.federated.clients.learner import Learner, Progress
    from arclight.federated.protocol import Evaluate, Evaluated, Fit, Update


class Crew(Protocol):
    """Trains some clients, as many at once as it has slots; called from one thread for each slot."""

    clients: tuple[str, ...]
    """Those whose data are here alone; empty for a crew that trains any client of the run."""
    slots: int

    def open(self, folder: Path, run: str) -> None:
        """Be ready for a run whose clients' folders lie in ``folder``. May be called again, with the same or another run."""

    def fit(self, order: Fit, weights: FolderStore, progress: Progress) -> Update:
        """Train a round (``order.weights`` lie in ``weights``); its update is then in the client's folder.

        Raises what the training raised, CancelledError where ``progress`` said so.
        """

    def evaluate(self, order: Evaluate, weights: FolderStore) -> Evaluated:
        """Measure weights."""

    def close(self) -> None:
        """Give back processes and memory."""


class InThisProcess:
    """Clients that are trained here, one at a time: they share this process's random number generators."""

    slots = 1
    _one_at_a_time = threading.Lock()

    def __init__(self, clients: Sequence[Client], *, resident: int | None = None) -> None:
        """``resident``: how many clients' learners stay in memory, by default all."""
        self._made = {client.name: client for client in clients}
        if len(self._made) != len(clients):
            raise FederatedError(f"two clients have one name: {', '.join(client.name for client in clients)}")
        self.clients = tuple(self._made)
        self._works = Works(self._learner, resident)

    def open(self, folder: Path, run: str) -> None:
        self._works.open(folder, run)

    def fit(self, order: Fit, weights: FolderStore, progress: Progress) -> Update:
        with self._one_at_a_time:
            update = self._works.fit(order, weights, progress)
        assert update is not None
        return update

    def evaluate(self, order: Evaluate, weights: FolderStore) -> Evaluated:
        with self._one_at_a_time:
            evaluated = self._works.evaluate(order, weights)
        assert evaluated is not None
        return evaluated

    def close(self) -> None:
        self._works.close()

    def _learner(self, client: str, folder: Path) -> Learner:
        if client not in self._made:
            raise FederatedError(f"this node has no client {client!r}; it has {', '.join(self.clients)}")
        return self._made[client].learner(folder)


class Anyone(InThisProcess):
    """Any client of a run whose data every node can read: ``make`` gives the client of a name when it is first asked for."""

    def __init__(self, make: Callable[[str], Client], *, resident: int | None = None) -> None:
        super().__init__([], resident=resident)
        self._make = make

    def _learner(self, client: str, folder: Path) -> Learner:
        if client not in self._made:
            self._made[client] = self._make(client)
        return super()._learner(client, folder)
