"""What a node is at for its clients: orders on their way from the server, to the workers, and their outcomes on the way back.

Three kinds of threads share one `JobQueue`: one asks and fetches, some train, some tell the server what came of it. Which of them may
take up what is decided here, by orders and rounds alone: a client is trained by one at a time, its rounds in their order; what came
of them is told in their order, too; and a round begins when the server has all of the client's updates but the newest `Fit.overlap`,
for what those left unsaid is part of what this one says.
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
from arclight.federated.protocol import Doing, Evaluate, Evaluated, Failed, Fit, Update

log = logging.getLogger(__name__)

_LOOK = 0.5
"""Seconds between looks at whether the node is to end."""
T = TypeVar("T")
Stage = Literal["coming", "ready", "training", "done", "telling"]


@dataclass(eq=False)
class Job:
    """One order, from its arrival until the server has heard what became of it."""

    client: str
    round: int
    folder: ClientStore
    order: Fit | Evaluate | None = None
    """None for an update that was finished before the node was started."""
    stage: Stage = "coming"
    """Its weights are fetched; it waits for a worker, is with one; its outcome waits to be told, is told."""
    weights: FolderStore | None = None
    outcome: Update | Evaluated | Failed | None = None
    steps: int = 0
    loss: float | None = None
    until: float | None = None
    cancelled: str = ""
    about: str = ""
    """What it was last said to wait for."""

    @classmethod
    def of(cls, order: Fit | Evaluate, folder: ClientStore) -> Job:
        until = None if order.deadline is None else time.monotonic() + order.deadline
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
        """Which of the round's attempts, and of its secure sums, it is for."""
        return self.order.attempt if isinstance(self.order, Fit) else 0

    def progress(self, steps: int, loss: float | None) -> None:
        """Told by who trains it. Raises CancelledError where it is not to go on."""
        self.steps, self.loss = steps, self.loss if loss is None or not math.isfinite(loss) else loss
        if self.until is not None and time.monotonic() > self.until:
            raise CancelledError(f"round {self.round} has run out of time after {steps} steps")
        self.wanted()

    def wanted(self) -> None:
        """Raises CancelledError where the server has said that it is not."""
        if self.cancelled:
            raise CancelledError(self.cancelled)


@dataclass
class _Requeued:
    """Rounds of a client that the server gives anew, after one that failed and may go well the next time."""

    after: int
    asked: float = math.inf
    """Asks up to this one may still be answered with what was given before."""


class JobQueue:
    """All jobs of a node with so many workers. Methods may be called from any thread."""

    def __init__(self, slots: int, stopping: threading.Event) -> None:
        self._slots, self._stopping = slots, stopping
        self._jobs: list[Job] = []
        self._put_back: dict[str, _Requeued] = {}
        self._over = set[tuple[tuple[str, str, int], int]]()
        """What came to its end since an ask was sent that may still be answered with it."""
        self._asks = 0
        self._changed = threading.Condition()

    def asking(self) -> tuple[Doing, ...]:
        """As `doing`; whatever answers what was asked before does not come any more."""
        with self._changed:
            self._over.clear()
            return self.doing()

    def doing(self) -> tuple[Doing, ...]:
        """As asks and beats say it: one that has failed may come again, and is not said to be here."""
        with self._changed:
            return tuple(
                Doing(
                    client=job.client, round=job.round, kind=job.kind, steps=job.steps, loss=job.loss, attempt=job.sum
                )
                for job in self._jobs
                if not isinstance(job.outcome, Failed)
            )

    def bases(self) -> set[str]:
        """Digests of weights that jobs begin from."""
        with self._changed:
            return {job.base for job in self._jobs if job.stage in ("coming", "ready", "training")}

    # -- orders come ---------------------------------------------------------------------------------------------------

    def to_ask(self, ahead: int | None, clients: Collection[str], most: int) -> int | None:
        """The number of an ask, where there is reason to ask the server for more.

        ahead: rounds that a client may have beside the one it is at; None: nothing is asked for before a worker is free.
        clients: those of this node; none: it takes any. most: orders that may wait for a worker.
        """
        with self._changed:
            if self._free() <= 0 and (ahead is None or not self._room(ahead, clients, most)):
                return None
            self._asks += 1
            return self._asks

    def add(self, job: Job, ask: int) -> bool:
        """Take a job that came as the answer to an ask; False for one that is or was here already, or is going to be given anew."""
        with self._changed:
            if (job.work, job.sum) in self._over:
                return False
            for other in self._jobs:
                if (other.work, other.sum) == (job.work, job.sum) and not other.cancelled:
                    if other.base in ("", job.base):
                        return False
                    other.cancelled = f"round {job.round} of {job.client} was begun anew from other weights"
            put = self._put_back.get(job.client)
            if put is not None and ask <= put.asked and job.kind == "fit" and job.round > put.after:
                return False
            self._jobs.append(job)
            return True

    def left(self, job: Job) -> None:
        """Take what was finished before: by a former process, or what the server may have lost."""
        with self._changed:
            if all(other.work != job.work for other in self._jobs):
                self._jobs.append(job)
            self._changed.notify_all()

    def ready(self, job: Job, weights: FolderStore) -> None:
        """A job's weights are here."""
        with self._changed:
            job.weights, job.stage = weights, "ready"
            self._changed.notify_all()

    # -- workers take them ---------------------------------------------------------------------------------------------

    def to_train(self) -> Job | None:
        """A job that a worker can begin now, and is to."""
        return self._next("training", self._may_begin)

    def done(self, job: Job, outcome: Update | Evaluated | Failed) -> None:
        """A job has come to something, which is to be told."""
        with self._changed:
            job.outcome, job.stage = outcome, "done"
            if isinstance(outcome, Failed) and outcome.again and job.kind == "fit":
                self._put_back[job.client] = _Requeued(job.round)
                for other in [x for x in self._jobs if _is_later(x, job) and x.stage in ("coming", "ready")]:
                    other.cancelled = f"round {job.round} of {job.client} is tried again first"
                    self._jobs.remove(other)
            self._changed.notify_all()

    # -- and the server is told ----------------------------------------------------------------------------------------

    def to_tell(self) -> Job | None:
        """A job whose outcome the server can be told of now, and is to."""
        return self._next("telling", self._may_tell)

    def over(self, job: Job) -> None:
        """The server has heard what came of a job, or does not want to."""
        with self._changed:
            put = self._put_back.get(job.client)
            if put is not None and put.after == job.round and put.asked == math.inf:
                put.asked = self._asks
            if not isinstance(job.outcome, Failed):
                self._over.add((job.work, job.sum))
            if job in self._jobs:
                self._jobs.remove(job)
            self._changed.notify_all()

    # -- what is not wanted --------------------------------------------------------------------------------------------

    def cancel(self, unwanted: Iterable[Doing]) -> None:
        """The server does not wait for these any more: who is at them hears of it, and nobody begins them."""
        with self._changed:
            works = {(one.kind, one.client, one.round) for one in unwanted}
            for job in [job for job in self._jobs if job.work in works]:
                job.cancelled = job.cancelled or f"the server no longer waits for round {job.round} of {job.client}"

    def stop(self) -> None:
        """Break off what is under way; it goes on when the node is started again."""
        with self._changed:
            for job in self._jobs:
                job.cancelled = job.cancelled or "the node was told to stop"
            self._changed.notify_all()

    # -- which is next -------------------------------------------------------------------------------------------------

    def waited(self, take: Callable[[], T | None]) -> T | None:
        """What `to_ask`, `to_train` or `to_tell` gives, once there is something; None where the node is to end."""
        with self._changed:
            while not self._stopping.is_set():
                if (found := take()) is not None:
                    return found
                self._changed.wait(_LOOK)
        return None

    def _next(self, stage: Stage, may: Callable[[Job], bool]) -> Job | None:
        with self._changed:
            job = next(filter(may, self._jobs), None)
            if job is not None:
                job.stage = stage
                self._changed.notify_all()
            return job

    def _free(self) -> int:
        """Workers for which there is nothing to do."""
        return self._slots - sum(job.stage in ("coming", "ready", "training") for job in self._jobs)

    def _room(self, ahead: int, clients: Collection[str], most: int) -> bool:
        if sum(job.stage in ("coming", "ready") for job in self._jobs) >= most:
            return False
        return not clients or any(sum(job.client == client for job in self._jobs) <= ahead for client in clients)

    def _may_begin(self, job: Job) -> bool:
        if job.stage != "ready":
            return False
        for other in self._jobs:
            if other is job or other.client != job.client:
                continue
            if other.stage == "training" or (other.stage in ("coming", "ready") and _is_later(job, other)):
                return False
            overlap = job.order.overlap if isinstance(job.order, Fit) else math.inf
            if job.kind == other.kind == "fit" and other.round < job.round - overlap:
                if job.about != (about := f"the server to have its round {other.round}"):
                    job.about = about
                    log.info("client %s: round %d waits for %s", job.client, job.round, about)
                return False
        return True

    def _may_tell(self, job: Job) -> bool:
        if job.stage != "done":
            return False
        mine = [other for other in self._jobs if other.client == job.client and other.stage in ("done", "telling")]
        return all(other.stage != "telling" and not _is_later(job, other) for other in mine)


def _is_later(one: Job, other: Job) -> bool:
    """Whether both are rounds of one client, and the one comes after the other."""
    return one.client == other.client and one.kind == other.kind == "fit" and one.round > other.round
