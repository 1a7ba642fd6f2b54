"""Run orders of a node's clients and write their updates, in this process.

`Executor` is the Protocol that a node calls: `InProcessExecutor` here trains in the node's process, `worker_processes` in others. Both hold
`ClientRunners`; a `ClientRunner` has the learner train one order, and writes the update where `client_store` expects it. Clipping, noise,
residual and codec come in this order; a resumed client must write the same bytes (noise aside).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from arclight.fabric.atomic_replace import replace_text
from arclight.federated.aggregation.fixed_point import has_changes
from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.clients.client_store import FinishedUpdates, Residuals, folder_name
from arclight.federated.codecs.encoding import MappedTensors, encode_all
from arclight.federated.codecs.settings import Raw, from_table
from arclight.federated.errors import FederatedError, ProtocolError
from arclight.federated.masks.experts import expert_of
from arclight.federated.privacy.noise import clip_and_add_noise
from arclight.federated.protocol import Evaluate, Evaluated, Failed, Fit, Update

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client
    from arclight.federated.clients.learner import Learner, Progress


class Executor(Protocol):
    """Train some clients, as many at once as it has slots; called from one thread for each slot."""

    clients: tuple[str, ...]
    """Clients whose data are only here; empty for workers that train any client of the run."""
    slots: int

    def open(self, folder: Path, run: str) -> None:
        """Prepare for a run whose clients' folders lie in ``folder``; may be called again."""

    def fit(self, order: Fit, weights: FolderStore, progress: Progress) -> Update:
        """Train a round and leave its update in the client's folder.

        ``order.weights`` lie in ``weights``.

        Raises what the training raised, CancelledError if ``progress`` said so.
        """

    def evaluate(self, order: Evaluate, weights: FolderStore) -> Evaluated:
        """Evaluate weights."""

    def close(self) -> None:
        """Release processes and memory."""


class InProcessExecutor:
    """Train clients here, one at a time: they share this process's random number generators."""

    slots = 1
    _one_at_a_time = threading.Lock()

    def __init__(self, clients: Sequence[Client], *, resident: int | None = None) -> None:
        """Initialise the executor.

        ``resident``: number of clients whose learners stay in memory, by default all.
        """
        self._made = {client.name: client for client in clients}
        if len(self._made) != len(clients):
            raise FederatedError(f"two clients have one name: {', '.join(client.name for client in clients)}")
        self.clients = tuple(self._made)
        self._runners = ClientRunners(self._learner, resident)

    def open(self, folder: Path, run: str) -> None:
        self._runners.open(folder, run)

    def fit(self, order: Fit, weights: FolderStore, progress: Progress) -> Update:
        with self._one_at_a_time:
            update = self._runners.fit(order, weights, progress)
        assert update is not None
        return update

    def evaluate(self, order: Evaluate, weights: FolderStore) -> Evaluated:
        with self._one_at_a_time:
            evaluated = self._runners.evaluate(order, weights)
        assert evaluated is not None
        return evaluated

    def close(self) -> None:
        self._runners.close()

    def _learner(self, client: str, folder: Path) -> Learner:
        if client not in self._made:
            raise FederatedError(f"this node has no client {client!r}; it has {', '.join(self.clients)}")
        return self._made[client].learner(folder)


log = logging.getLogger(__name__)


class ClientRunner:
    """Run one client's orders.

    ``leads``: this process reports for the client, if several train it (rank 0).
    """

    def __init__(self, learner: Learner, folder: Path, client: str, leads: bool = True) -> None:
        self.learner, self._client, self._finished, self._leads = learner, client, FinishedUpdates(folder), leads

    def fit(self, order: Fit, store: BlobStore, progress: Progress) -> Update | None:
        """Train a round, leave its update in the client's folder, return it on the leading process.

        The update is without node and session. ``order.weights`` lie in ``store``. What was finished before is not trained again.
        """
        if unknown := sorted(set(order.privacy) - {"noise", "secure"}):
            raise ProtocolError(
                f"this client does not support these privacy settings of the order, install the version of the server: {', '.join(unknown)}"
            )
        if (done := self._finished.of(order)) is not None:
            return done if self._leads else None
        weights, began = MappedTensors(order.weights, store), time.monotonic()
        outcome = self.learner.fit(order, weights, progress)
        seconds = time.monotonic() - began
        if not self._leads:
            for _ in range(2 if "noise" in order.privacy else 1):  # as often as the one that leads
                for key in outcome.tensors:  # each is gathered by all processes together
                    outcome.tensors[key]
            return None
        changes = _changes(order, outcome.tensors, weights)
        if "noise" in order.privacy:
            changes = clip_and_add_noise(lambda: _changes(order, outcome.tensors, weights), order.privacy["noise"])
        left: dict[str, torch.Tensor] = {}
        codec = from_table(order.codec)
        durable = order.overlap > 0 or not isinstance(codec, Raw)  # else it can be made again
        with self._finished.making(order, durable=durable) as staging:
            encoded = encode_all(changes, codec, self._finished.residuals(order.residual_slot).load(order.round), left)
            blobs = FolderStore(staging / "blobs", durable="all" if durable else "none")
            manifest = write_blobs(encoded, blobs, kind="update", base=order.base)
            if not manifest.tensors:
                raise FederatedError(
                    f"client {self._client} has nothing to send: no weight of its module is trained and sent"
                )
            Residuals.save(staging / "residuals" / str(order.residual_slot), left)
            update = Update(
                node="",
                session="",
                client=order.client,
                round=order.round,
                manifest=manifest,
                samples=outcome.samples,
                tokens=outcome.tokens,
                steps=outcome.steps,
                seconds=seconds,
                metrics=outcome.metrics,
                fragment=order.fragment,
                secure="secure" in order.privacy,
            )
            replace_text(staging / "update.json", update.to_json(), durable=durable)
        return update

    def evaluate(self, order: Evaluate, store: BlobStore) -> Evaluated | None:
        """Evaluate weights, as `fit` trains."""
        outcome = self.learner.evaluate(order, MappedTensors(order.weights, store))
        if not self._leads:
            return None
        return Evaluated(
            node="",
            session="",
            client=order.client,
            round=order.round,
            samples=outcome.samples,
            metrics=outcome.metrics,
        )

    def close(self) -> None:
        self.learner.close()


class ClientRunners:
    """Hold the runners of a process's clients, made when they are first needed.

    resident: how many stay in memory; of more, those that have waited longest are closed and go on from the disk. A client whose
    progress is not saved stays.
    """

    def __init__(
        self, learner: Callable[[str, Path], Learner], resident: int | None = None, leads: bool = True
    ) -> None:
        self._learner, self._resident, self._leads = learner, resident, leads
        self._folder, self._run = Path(), ""
        self._runners: dict[str, ClientRunner] = {}
        self._saved: set[str] = set()

    def open(self, folder: Path, run: str) -> None:
        """Use clients' folders in ``folder`` from now on."""
        if (folder, run) != (self._folder, self._run):
            self.close()
            self._folder, self._run = folder, run

    def fit(self, order: Fit, store: BlobStore, progress: Progress) -> Update | None:
        update = self._of(order.client).fit(order, store, progress)
        if order.checkpoint_every_steps:
            self._saved.add(order.client)
        return update

    def evaluate(self, order: Evaluate, store: BlobStore) -> Evaluated | None:
        return self._of(order.client).evaluate(order, store)

    def forget(self, client: str) -> None:
        """Close a client's learner; its next order resumes from the disk."""
        self._saved.discard(client)
        if (work := self._runners.pop(client, None)) is not None:
            work.close()

    def close(self) -> None:
        for client in list(self._runners):
            self.forget(client)

    def _of(self, client: str) -> ClientRunner:
        work = self._runners.pop(client, None)
        if work is None:
            waiting = [one for one in self._runners if one in self._saved]
            while self._resident is not None and len(self._runners) >= self._resident and waiting:
                self.forget(waiting.pop(0))
            folder = self._folder / folder_name(client)
            work = ClientRunner(self._learner(client, folder), folder, client, leads=self._leads)
        self._runners[client] = work  # the last is the one that was asked for last
        return work


M = TypeVar("M", Update, Evaluated, Failed)


def addressed(message: M, node: str, session: str) -> M:
    """Return a message with node and session filled in."""
    return dataclasses.replace(message, node=node, session=session)


def _changes(
    order: Fit, after: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the update: values, or the values before minus those after training.

    Floating point differences are taken in float32 or float64: those of 16-bit weights would lose what is small beside the weight.
    Local states are sent as they are: small values beside large ones count in them.
    """
    for key in after:
        value = after[key]
        whole, expert = expert_of(key) or (key, None)
        if order.form == "weights" or whole not in before or not key.startswith("model/"):
            yield key, value
            continue
        if not has_changes(value.dtype):
            raise FederatedError(
                f"{key} is of {value.dtype}, which has no changes to send: leave it out of what the client gives, or set "
                'send = "weights"'
            )
        narrow = value.is_floating_point() and value.dtype != torch.float64
        wide = torch.float32 if narrow else value.dtype
        began = before[whole] if expert is None else before[whole][expert]
        yield key, began.to(wide) - value.to(wide)
