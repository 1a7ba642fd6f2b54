"""Queue a node's jobs: orders on their way in to the executor, results on their way out.

A node's threads share one `JobQueue`: one requests orders and downloads, some train, some report results, one sends heartbeats. What each
may take next is decided here, by orders and rounds alone: a client is trained by one thread at a time, its rounds in order; its
results are reported in order, too; and a round starts when the server has all of the client's updates but the newest
`Fit.overlap`, because their residuals are part of its own update.

`node` and `reporter` use it; nothing else knows its states, and nothing of it is on disk.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients.client_store import ClientStore
from arclight.federated.errors import CancelledError
from arclight.federated.protocol import ActiveWork, Evaluate, Evaluated, Failed, Fit, Update

log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Seconds between checks whether the node is to end."""
T = TypeVar("T")
Stage = Literal["fetching", "ready", "training", "done", "reporting"]


@dataclass(eq=False)
class Job:
    """One order, from its arrival until the server knows its result."""

    client: str
    round: int
    folder: ClientStore
    order: Fit | Evaluate | None = None
    """None for an update that was finished before the node was started."""
    stage: Stage = "fetching"
    """Stages in order: weights are fetched, it waits for a worker, runs, waits to be reported, is reported."""
    weights: FolderStore | None = None
    outcome: Update | Evaluated | Failed | None = None
    steps: int = 0
    loss: float | None = None
    until: float | None = None
    cancelled: str = ""
    about: str = ""
    """What the server last reported that it waits for."""

    @classmethod
    def of(cls, order: Fit | Evaluate, folder: ClientStore) -> Job:
        until = None if order.deadline_s is None else time.monotonic() + order.deadline_s
        return cls(order.client, order.round, folder, order, until=until)

    @property
    def kind(self) -> Literal["fit", "evaluate"]:
        return "evaluate" if isinstance(self.order, Evaluate) else "fit"

    @property
    def work(self) -> tuple[str, str, int]:
        return self.kind, self.client, self.round

    @property
    def base(self) -> str:
        return self.order.base if self.order is not None else ""

    @property
    def sum(self) -> int:
        """Return which of the round's attempts, and of its secure sums, it is for."""
        return self.order.attempt if isinstance(self.order, Fit) else 0

    def progress(self, steps: int, loss: float | None) -> None:
        """Record progress of the training.

        Raises CancelledError if it is to stop.
        """
        self.steps, self.loss = steps, self.loss if loss is None or not math.isfinite(loss) else loss
        if self.until is not None and time.monotonic() > self.until:
            raise CancelledError(f"round {self.round} has run out of time after {steps} steps")
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """Raise CancelledError if the server has cancelled it."""
        if self.cancelled:
            raise CancelledError(self.cancelled)


@dataclass
class _Requeued:
    """Rounds of a client that the server sends again after one that failed."""

    after: int
    asked: float = math.inf
    """Number of the newest work request that may still be answered with what was given before."""


class JobQueue:
    """Hold all jobs of a node with so many slots. Methods may be called from any thread."""

    def __init__(self, slots: int, stopping: threading.Event) -> None:
        self._slots, self._stopping = slots, stopping
        self._jobs: list[Job] = []
        self._requeued: dict[str, _Requeued] = {}
        self._finished = set[tuple[tuple[str, str, int], int]]()
        """What came to its end since a request was sent that may still be answered with it."""
        self._asks = 0
        self._changed = threading.Condition()

    def active_work_for_request(self) -> tuple[ActiveWork, ...]:
        """Return `active_work` for a new request; replies to former requests can no longer come."""
        with self._changed:
            self._finished.clear()
            return self.active_work()

    def active_work(self) -> tuple[ActiveWork, ...]:
        """List the work of requests and heartbeats; failed work may come again and is left out."""
        with self._changed:
            return tuple(
                ActiveWork(
                    client=job.client, round=job.round, kind=job.kind, steps=job.steps, loss=job.loss, attempt=job.sum
                )
                for job in self._jobs
                if not isinstance(job.outcome, Failed)
            )

    def bases(self) -> set[str]:
        """Return the digests of weights that jobs start from."""
        with self._changed:
            return {job.base for job in self._jobs if job.stage in ("fetching", "ready", "training")}

    # -- orders come ---------------------------------------------------------------------------------------------------

    def next_request(self, ahead: int | None, clients: Collection[str], most: int) -> int | None:
        """Return the number of the next work request, or None if the queue is full.

        ahead: rounds that a client may have beside the one it is at; None: nothing is asked for before a worker is free.
        clients: those of this node; none: it takes any. most: orders that may wait for a worker.
        """
        with self._changed:
            if self._free() <= 0 and (ahead is None or not self._has_room(ahead, clients, most)):
                return None
            self._asks += 1
            return self._asks

    def add(self, job: Job, request: int) -> bool:
        """Add a job that came in reply to a request.

        Return False for one that is or was here already, or that will be sent again.
        """
        with self._changed:
            if (job.work, job.sum) in self._finished:
                return False
            for other in self._jobs:
                if (other.work, other.sum) == (job.work, job.sum) and not other.cancelled:
                    if other.base in ("", job.base):
                        return False
                    other.cancelled = f"round {job.round} of {job.client} was begun again from other weights"
            put = self._requeued.get(job.client)
            if put is not None and request <= put.asked and job.kind == "fit" and job.round > put.after:
                return False
            self._jobs.append(job)
            return True

    def restore(self, job: Job) -> None:
        """Add a result that was finished before.

        By a former process, or one that the server may have lost.
        """
        with self._changed:
            if all(other.work != job.work for other in self._jobs):
                self._jobs.append(job)
            self._changed.notify_all()

    def ready(self, job: Job, weights: FolderStore) -> None:
        """Record that a job's weights have been fetched."""
        with self._changed:
            job.weights, job.stage = weights, "ready"
            self._changed.notify_all()

    # -- workers take them ---------------------------------------------------------------------------------------------

    def next_to_train(self) -> Job | None:
        """Return a job that a slot can start now, and mark it as started."""
        return self._next("training", self._may_start)

    def done(self, job: Job, outcome: Update | Evaluated | Failed) -> None:
        """Record a job's result, to be reported."""
        with self._changed:
            job.outcome, job.stage = outcome, "done"
            if isinstance(outcome, Failed) and outcome.retryable and job.kind == "fit":
                self._requeued[job.client] = _Requeued(job.round)
                for other in [x for x in self._jobs if _is_later(x, job) and x.stage in ("fetching", "ready")]:
                    other.cancelled = f"round {job.round} of {job.client} is tried again first"
                    self._jobs.remove(other)
            self._changed.notify_all()

    # -- reports -------------------------------------------------------------------------------------------------------

    def next_to_report(self) -> Job | None:
        """Return a job whose result can be reported now, and mark it so."""
        return self._next("reporting", self._may_report)

    def finish(self, job: Job) -> None:
        """Remove a job whose result the server has, or does not want."""
        with self._changed:
            put = self._requeued.get(job.client)
            if put is not None and put.after == job.round and put.asked == math.inf:
                put.asked = self._asks
            if not isinstance(job.outcome, Failed):
                self._finished.add((job.work, job.sum))
            if job in self._jobs:
                self._jobs.remove(job)
            self._changed.notify_all()

    # -- cancelling ----------------------------------------------------------------------------------------------------

    def cancel(self, unwanted: Iterable[ActiveWork]) -> None:
        """Cancel work that the server no longer waits for."""
        with self._changed:
            works = {(one.kind, one.client, one.round) for one in unwanted}
            for job in [job for job in self._jobs if job.work in works]:
                job.cancelled = job.cancelled or f"the server no longer waits for round {job.round} of {job.client}"

    def stop(self) -> None:
        """Cancel running jobs; they resume when the node is started again."""
        with self._changed:
            for job in self._jobs:
                job.cancelled = job.cancelled or "the node was told to stop"
            self._changed.notify_all()

    # -- which is next -------------------------------------------------------------------------------------------------

    def wait_for(self, take: Callable[[], T | None]) -> T | None:
        """Wait for a result of ``take`` (`next_request` and kin); None when the node is to end."""
        with self._changed:
            while not self._stopping.is_set():
                if (found := take()) is not None:
                    return found
                self._changed.wait(_POLL_S)
        return None

    def _next(self, stage: Stage, may: Callable[[Job], bool]) -> Job | None:
        with self._changed:
            job = next(filter(may, self._jobs), None)
            if job is not None:
                job.stage = stage
                self._changed.notify_all()
            return job

    def _free(self) -> int:
        """Count slots for which there is nothing to do."""
        return self._slots - sum(job.stage in ("fetching", "ready", "training") for job in self._jobs)

    def _has_room(self, ahead: int, clients: Collection[str], most: int) -> bool:
        if sum(job.stage in ("fetching", "ready") for job in self._jobs) >= most:
            return False
        return not clients or any(sum(job.client == client for job in self._jobs) <= ahead for client in clients)

    def _may_start(self, job: Job) -> bool:
        if job.stage != "ready":
            return False
        for other in self._jobs:
            if other is job or other.client != job.client:
                continue
            if other.stage == "training" or (other.stage in ("fetching", "ready") and _is_later(job, other)):
                return False
            overlap = job.order.overlap if isinstance(job.order, Fit) else math.inf
            if job.kind == other.kind == "fit" and other.round < job.round - overlap:
                if job.about != (about := f"the server to have its round {other.round}"):
                    job.about = about
                    log.info("client %s: round %d waits for %s", job.client, job.round, about)
                return False
        return True

    def _may_report(self, job: Job) -> bool:
        if job.stage != "done":
            return False
        mine = [other for other in self._jobs if other.client == job.client and other.stage in ("done", "reporting")]
        return all(other.stage != "reporting" and not _is_later(job, other) for other in mine)


def _is_later(one: Job, other: Job) -> bool:
    """Return True if both are rounds of one client and the one comes after the other."""
    return one.client == other.client and one.kind == other.kind == "fit" and one.round > other.round
