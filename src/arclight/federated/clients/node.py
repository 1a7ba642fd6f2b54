"""Run a site's node: request orders, train its clients, report results, survive crashes.

Connection and workers are busy at the same time. One thread requests orders and downloads weights while workers train earlier
orders; each worker has a thread; as many report results, and one sends heartbeats. `JobQueue` decides which job may start when.

``arclight federate`` (in one process, and ``join``), `Server.run` and Flower's client app start a `Node`. It takes a `Link` and the clients to
train; nothing leaves the site but what the protocol names. A node that is started again resumes from its folder: ``node.json`` and
``<run>/clients/<client>/`` stay readable.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from arclight._intervals import former_names
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.blobs.blob_store import BlobStore, check_digest
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients.client_store import ClientStore, folder_name, list_clients, read_json
from arclight.federated.clients.executor import Executor, InProcessExecutor
from arclight.federated.clients.job_queue import Job, JobQueue
from arclight.federated.clients.reporter import ResultReporter, failure_of
from arclight.federated.clients.secure_sum_client import Identity
from arclight.federated.clients.session import ClosedError, Session
from arclight.federated.codecs.delta_chain import WeightsReplica
from arclight.federated.errors import OBSERVED, BlobError, CancelledError, LinkError, ProtocolError
from arclight.federated.protocol import (
    Close,
    Evaluate,
    Failed,
    Fit,
    Heartbeat,
    HeldRound,
    Receipt,
    Update,
    Wait,
    WorkRequest,
)

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client
    from arclight.federated.transports.link import Link

log = logging.getLogger(__name__)

_THREAD_TIMEOUT_S = 30.0
_RETRY_PAUSE_S = 5.0
"""Seconds before a failure that may pass is reported: the server asks again at once, and not often."""
_MAX_WAITING = 8
"""Most orders of a node's own clients that wait for its workers; a node that takes any client lets as many wait as it has workers."""


@former_names(patience="retry_timeout_s")
class Node:
    """Work for a server until it ends the run.

    clients: what is trained here, or a `Executor` that trains it. folder: where clients' states, weights and unsent updates lie; a
    node that is started again with it goes on where it was. name: the same after a restart. retry_timeout_s: how long a server
    that is away is tried again. hold_s: seconds for which the server may hold a request for work. identity: signs its
    clients' keys of secure sums, and verifies those of others.
    """

    def __init__(
        self,
        link: Link,
        clients: Sequence[Client] | Executor,
        folder: str | Path,
        name: str,
        *,
        retry_timeout_s: float = 3600.0,
        hold_s: float = 20.0,
        identity: Identity | None = None,
    ) -> None:
        self._executor: Executor = InProcessExecutor(clients) if isinstance(clients, Sequence) else clients
        self._link, self._folder, self.name, self._hold_s = link, Path(folder), name, hold_s
        self._stopping = threading.Event()
        link.cancel_on(self._stopping)
        self._session = Session(link, name, self._executor.clients, self._held, retry_timeout_s, self._stopping)
        self._jobs = JobQueue(self._executor.slots, self._stopping)
        self._reporter = ResultReporter(name, self._session, link, self._jobs, self._stopping, hold_s, identity)
        self._folders: dict[str, ClientStore] = {}
        self._opened = ""
        self._speed: float | None = None
        self._error: BaseException | None = None
        self.closed = ""
        """Why the server ended the run for this node."""

    @property
    def moved(self) -> bool:
        """Return True if it ended because the server is at another run now.

        A new node may join that with the same folder.
        """
        return self._session.moved

    @property
    def failed(self) -> bool:
        """Return True if it ended because the run could not go on, or has no place for it."""
        return self._session.failed

    def run(self) -> None:
        """Join and work until the run is over or `stop` is called.

        Raises what ended the node otherwise.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        asking = self._thread("ask", self._keep_requesting)
        others = [self._thread("beat", self._keep_beating)]
        for slot in range(self._executor.slots):
            others.append(self._thread(f"report-{slot}", self._keep_reporting))
            others += [self._thread(f"slot-{slot}", self._keep_training)] if slot else []
        try:
            self._join()
            for thread in (asking, *others):
                thread.start()
            self._keep_training()
            self._wait_for(others)
        except ClosedError as closed:
            self.closed = str(closed)
        finally:
            self._stopping.set()
            self._session.leave()  # before workers end, which takes seconds
            self._executor.close()
            self._wait_for([asking])  # the server answers what it has held when the node leaves
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End soon and in order, from any thread; broken-off training resumes at the next start."""
        self._stopping.set()
        self._jobs.stop()

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=target, name=f"arclight-{name}", daemon=True)

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            if thread.ident is not None:
                thread.join(_THREAD_TIMEOUT_S + self._hold_s)
            if thread.is_alive():
                log.warning(
                    "%s of node %s has not ended after %g s", thread.name, self.name, _THREAD_TIMEOUT_S + self._hold_s
                )

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._open(str(read_json(self._folder / "node.json").get("run", "")))
        run = self._session.join().run
        self._open(run)
        replace_text(self._folder / "node.json", json.dumps({"node": self.name, "run": run}))
        self._bases = WeightsCache(self._place, self._link.blobs)
        self._executor.open(self._place / "clients", run)
        for client, folder in self._folders.items():
            for round in folder.finished.rounds():
                if folder.finished.is_accepted(round):
                    self._reporter.keep(folder)
                else:
                    log.info("node %s sends what client %s had finished of round %d", self.name, client, round)
                    update = folder.finished.update(round)
                    self._jobs.restore(Job(client, round, folder, stage="done", outcome=update, steps=update.steps))

    def _open(self, run: str) -> None:
        """Open the folders of a run; those of the last one are read before the server names its run."""
        if not run or self._opened == run:
            return
        self._opened, self._place = run, self._folder / folder_name(run)
        names = self._executor.clients or list_clients(self._place / "clients")
        self._folders = {name: ClientStore(self._client(name), name, run) for name in names}
        for folder in self._folders.values():  # what was to be masked: its masks have gone with the process
            for round in folder.finished.rounds():
                if not folder.finished.is_accepted(round) and folder.finished.update(round).secure:
                    folder.finished.drop(round)

    def _client(self, name: str) -> Path:
        return self._place / "clients" / folder_name(name)

    def _held(self) -> tuple[list[HeldRound], float | None]:
        return [held for folder in list(self._folders.values()) for held in folder.held()], self._speed

    # -- orders come -------------------------------------------------------------------------------------------------

    def _keep_requesting(self) -> None:
        """Request orders and fetch their weights while the queue has room."""
        about, own = "", self._executor.clients
        most = _MAX_WAITING if own else self._executor.slots

        def reason() -> int | None:
            return self._jobs.next_request(self._session.welcome.prefetch_rounds, own, most)

        with self._node_errors():
            while (number := self._jobs.wait_for(reason)) is not None:
                answer = self._session.send(self._work_request)
                match answer:
                    case Fit() | Evaluate():
                        self._accept_order(answer, number)
                    case Wait():
                        if answer.waiting_for != about:
                            about = answer.waiting_for
                            log.info("node %s waits for %s", self.name, about or "work")
                        self._stopping.wait(answer.retry_after_s)
                    case Close():
                        raise self._session.closed(answer)
                    case _:
                        raise ProtocolError(f"the server answered {answer.kind!r} to a request for work")

    def _work_request(self, session: str) -> WorkRequest:
        return WorkRequest(
            node=self.name, session=session, hold_s=self._hold_s, active_work=self._jobs.active_work_for_request()
        )

    def _accept_order(self, order: Fit | Evaluate, request: int) -> None:
        job = Job.of(order, self._folder_of(order))
        if isinstance(order, Fit):
            self._reporter.query_before_round(order, job.folder)
        if not self._jobs.add(job, request):
            return
        with self._job_errors(job):
            if isinstance(order, Fit):
                if order.redo:
                    job.folder.finished.drop(order.round)
                if (update := job.folder.finished.of(order)) is not None:
                    self._jobs.done(job, update)
                    return
                job.folder.start(order.round)
            fetched = list[FolderStore]()
            self._session.retry(lambda: fetched.append(self._fetch(order, job)))
            self._jobs.ready(job, fetched[-1])
            self._bases.tidy(self._jobs.bases())

    def _fetch(self, order: Fit | Evaluate, job: Job) -> FolderStore:
        return self._bases.fetch(order, self._jobs.bases(), job.raise_if_cancelled)

    def _folder_of(self, order: Fit | Evaluate) -> ClientStore:
        if order.run != self._session.welcome.run:
            raise ProtocolError(f"an order of run {order.run!r} in run {self._session.welcome.run!r}")
        if order.client not in self._folders:
            if self._executor.clients:
                raise ProtocolError(
                    f"an order for client {order.client!r}; this node has {', '.join(self._executor.clients)}"
                )
            self._folders[order.client] = ClientStore(self._client(order.client), order.client, order.run)
        return self._folders[order.client]

    # -- workers do them ---------------------------------------------------------------------------------------------

    def _keep_training(self) -> None:
        with self._node_errors():
            while (job := self._jobs.wait_for(self._jobs.next_to_train)) is not None:
                with self._job_errors(job):
                    self._train(job)

    def _train(self, job: Job) -> None:
        assert job.weights is not None
        job.progress(0, None)  # it may have waited for too long
        if isinstance(job.order, Evaluate):
            self._jobs.done(job, self._executor.evaluate(job.order, job.weights))
            return
        assert isinstance(job.order, Fit)
        update = self._executor.fit(job.order, job.weights, job.progress)
        self._speed, job.steps = update.steps / max(update.seconds, 1e-3), update.steps
        job.folder.end(job.round)
        self._jobs.done(job, update)

    @contextmanager
    def _job_errors(self, job: Job) -> Iterator[None]:
        """Report an error of a job to the server; it ends the job, not the node."""
        try:
            yield
        except (ClosedError, LinkError):
            raise
        except Exception as error:  # whatever a client's own code raises is its own matter
            about = f"node {self.name}, client {job.client}, round {job.round}"
            if isinstance(error, CancelledError):
                log.info("%s: %s", about, error)
            else:
                log.error("%s: it has failed: %s", about, error, exc_info=True, extra=OBSERVED)
            if not self._stopping.is_set():
                job.folder.end(job.round)
            if isinstance(error, CancelledError) and job.cancelled:
                self._jobs.finish(job)
                return
            failed = failure_of(job, error)
            if failed.retryable:
                self._thread(f"retry-{job.client}", lambda: self._report_later(job, failed)).start()
            else:
                self._jobs.done(job, failed)

    def _report_later(self, job: Job, failed: Failed) -> None:
        """Report a failure that may pass after a pause, in which a full disk may get room.

        The server asks again at once. Other jobs go on meanwhile.
        """
        self._stopping.wait(_RETRY_PAUSE_S)
        self._jobs.done(job, failed)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _keep_reporting(self) -> None:
        with self._node_errors():
            while (job := self._jobs.wait_for(self._jobs.next_to_report)) is not None:
                if isinstance(job.outcome, Update) and job.outcome.secure and job.order is not None:
                    self._thread(f"secure-{job.client}", lambda job=job: self._report_masked(job)).start()  # type: ignore[misc]
                    continue
                try:
                    self._reporter.report(job)
                except (BlobError, OSError) as error:
                    if not isinstance(job.outcome, Update):
                        raise
                    self._not_sent(job, error)
                else:
                    self._jobs.finish(job)

    def _not_sent(self, job: Job, error: BlobError | OSError) -> None:
        """Turn an update that cannot be read here into its client's failure."""
        log.error("node %s cannot send round %d of %s: %s", self.name, job.round, job.client, error, extra=OBSERVED)
        job.folder.finished.drop(job.round)
        self._jobs.done(job, failure_of(job, error))

    def _report_masked(self, job: Job) -> None:
        """Report a masked update in a thread of its own.

        Clients of a secure sum wait for each other.
        """
        with self._node_errors():
            self._reporter.report_masked(job, lambda: self._jobs.finish(job))
            self._jobs.finish(job)

    @contextmanager
    def _node_errors(self) -> Iterator[None]:
        """End the node with an error of one of its threads."""
        try:
            yield
        except ClosedError as closed:
            if not self._stopping.is_set():
                self.closed = str(closed)
            self.stop()
        except BaseException as error:
            if not (self._stopping.is_set() and isinstance(error, LinkError)):  # a node that ends tries no more
                self._error = self._error or error
            self.stop()

    def _keep_beating(self) -> None:
        """Send heartbeats with progress, and cancel work that is no longer wanted."""
        with self._node_errors():
            while not self._stopping.wait(self._session.welcome.heartbeat_interval_s):
                lost = self._session.welcome.session
                answer = self._session.try_to_send(
                    lambda session: Heartbeat(node=self.name, session=session, active_work=self._jobs.active_work())
                )
                if not isinstance(answer, Receipt):
                    continue
                if answer.reason == "session":
                    self._session.join(lost=lost)
                self._reporter.commit(answer.committed)
                self._jobs.cancel(answer.cancel)


class WeightsCache:
    """Fetch weights once for all jobs that start from them, each into a folder of its own.

    Used by one thread; executors only read what it gave them.
    """

    def __init__(self, folder: Path, remote: BlobStore) -> None:
        self._folder = folder / "bases"
        shutil.rmtree(self._folder, ignore_errors=True)  # a killed process's: its orders come again
        self._here = FolderStore(folder / "weights", durable="none")
        self._replica = WeightsReplica(self._here, remote)

    def fetch(self, order: Fit | Evaluate, needed: Set[str], wanted: Callable[[], None]) -> FolderStore:
        """Return the files of the order's weights, fetched if need be.

        needed: digests of weights that stay; others are removed before. wanted: raises if the order has been withdrawn
        meanwhile. Raises BlobError, LinkError as `WeightsReplica.fetch`.
        """
        self.tidy(needed)
        store = FolderStore(self._folder / check_digest(order.base), durable="none")
        if any(store.size(digest) is None for digest in order.weights.blobs):
            self._replica.fetch(order.weights, order.changes, wanted)
            for digest in order.weights.blobs:
                store.adopt(digest, self._here.file(digest))
        return store

    def tidy(self, needed: Set[str]) -> None:
        """Remove weights that are neither ``needed`` nor the newest.

        Removing large files takes a while: call it while nobody waits.
        """
        for former in self._folder.iterdir() if self._folder.is_dir() else ():
            if former.name not in needed:
                shutil.rmtree(former, ignore_errors=True)
        self._replica.tidy()
