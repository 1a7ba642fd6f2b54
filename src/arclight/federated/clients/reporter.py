"""Report results of a node's jobs: upload blobs, then send the message until acknowledged.

`node` has one `ResultReporter` for all of its threads. An update counts as delivered only with a receipt, and may be lost again with a
server that crashes before it commits: until then it is kept, and a node in a new session asks the server about it. Residuals become the
client's only with the receipt: keep that order.
"""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from arclight.fabric.atomic_replace import DISK_FULL
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.transfer import transfer
from arclight.federated.clients.client_store import ClientStore, FinishedUpdates
from arclight.federated.clients.executor import addressed
from arclight.federated.clients.job_queue import Job, JobQueue
from arclight.federated.clients.secure_sum_client import Identity, SecureSumClient
from arclight.federated.clients.session import ClosedError, Session, as_client_error
from arclight.federated.disk_full import DISK_RETRY_INTERVAL_S, retry_while_disk_full
from arclight.federated.errors import OBSERVED, CancelledError, FederatedError, LinkError, ProtocolError, RefusedError
from arclight.federated.protocol import Close, Evaluated, Failed, Fit, Message, Receipt, Update

if TYPE_CHECKING:
    from arclight.federated.transports.link import Link

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Attempts to send an update that arrives damaged."""


class ResultReporter:
    """Report results to the server; thread-safe for results of different clients."""

    def __init__(
        self,
        node: str,
        session: Session,
        link: Link,
        jobs: JobQueue,
        stopping: threading.Event,
        hold_s: float = 20.0,
        identity: Identity | None = None,
    ) -> None:
        self._node, self._session, self._link, self._jobs, self._stopping = node, session, link, jobs, stopping
        self._hold_s, self._identity = hold_s, identity
        self._lock = threading.Lock()
        self._committed = -1
        self._keeping = set[ClientStore]()
        """Stores of clients with updates that the server has accepted and not yet committed."""

    def keep(self, folder: ClientStore) -> None:
        """Remember a client's store that holds an accepted update, until its round is committed."""
        with self._lock:
            self._keeping.add(folder)

    def commit(self, committed: int) -> None:
        """Drop updates of rounds up to this one, also those of clients that are no longer sampled."""
        with self._lock:
            if committed <= self._committed:
                return
            self._committed = committed
            folders, self._keeping = self._keeping, set()
        for folder in folders:
            self._commit_in(folder, committed)

    def _commit_in(self, folder: ClientStore, committed: int) -> None:
        """Drop a client's updates of committed rounds; query those that the server may have lost."""
        for round in folder.commit(committed, self._session.welcome.session):
            self.query_update(folder, round)
        if folder.finished.rounds():
            self.keep(folder)

    def query_update(self, folder: ClientStore, round: int) -> None:
        """Queue a query if the server still has an accepted update.

        It may have restarted.
        """
        try:
            update = folder.finished.update(round)
        except FederatedError as error:  # it has just been dropped, or is damaged
            log.warning("node %s cannot ask whether an update counts: %s", self._node, error)
            return
        self._jobs.restore(Job(update.client, round, folder, stage="done", outcome=update, steps=update.steps))

    def query_before_round(self, order: Fit, folder: ClientStore) -> None:
        """Query the updates that an order's round builds on, before it starts."""
        for round in folder.finished.rounds():
            if round < order.round - order.overlap and folder.finished.is_in_doubt(
                round, self._session.welcome.session
            ):
                self.query_update(folder, round)

    def report(self, job: Job) -> None:
        """Report a job's result.

        Raises only what ends the node: an unreachable server (LinkError), or a stop (ClosedError).
        """
        match job.outcome:
            case Update() as update:
                self.send(job, update, job.folder.finished.blobs(job.round))
            case Evaluated() as evaluated:
                about = f"evaluation of {job.client}"
                self._receipt(lambda session: addressed(evaluated, self._node, session), about)
            case Failed() as failed:
                self._receipt(lambda session: addressed(failed, self._node, session), f"failure of {job.client}")

    def report_masked(self, job: Job, sent: Callable[[], None]) -> None:
        """Report an update of a secure sum. ``sent`` is called when its values have arrived."""
        assert isinstance(job.order, Fit)
        assert isinstance(job.outcome, Update)
        folder, finished = job.folder.folder / "masked", job.folder.finished
        secure_sum = SecureSumClient(
            self._node, job.order, self._session.send, self._stopping, self._hold_s, self._identity
        )
        try:
            masked = secure_sum.masked(job.outcome, finished.blobs(job.round), folder)
            if not self.send(job, masked, FolderStore(folder)):
                return
        except (ClosedError, LinkError):
            raise
        except Exception as error:  # an error in one client's values must not stop the others
            job.outcome = failure_of(job, error)
            about = (self._node, job.client, job.round, error)
            log.error("node %s: %s has failed in round %d: %s", *about, exc_info=True, extra=OBSERVED)
            self.report(job)
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sent()
        try:
            secure_sum.reveal()
        except (ClosedError, LinkError):
            raise
        except FederatedError as error:
            log.error("node %s: %s sends no shares in round %d: %s", self._node, job.client, job.round, error)

    def send(self, job: Job, update: Update, blobs: FolderStore) -> bool:
        """Upload an update's blobs, send it until it is acknowledged; return True if accepted."""
        finished, about = job.folder.finished, f"{update.client}, round {update.round}"

        def raise_if_cancelled() -> None:
            if self._stopping.is_set():
                raise ClosedError("the node was told to stop")
            job.raise_if_cancelled()

        uploaded = job.order is None and finished.is_accepted(update.round)  # a query: does the server still have it?
        sessions = list[str]()

        def make(session: str) -> Update:
            sessions.append(session)
            return addressed(update, self._node, session)

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if not uploaded:
                    self._session.retry(partial(self._put, update, blobs, raise_if_cancelled))
            except CancelledError as error:
                log.info("node %s does not send the update of %s: %s", self._node, about, error)
                finished.drop(update.round)
                return False
            except RefusedError as error:
                job.outcome = failure_of(job, error)
                self.report(job)
                receipt = Receipt(accepted=False, reason=error.reason, message=str(error))
                break
            receipt, uploaded = self._receipt(make, f"update of {about}"), False
            if receipt.accepted:
                self._record_accepted(finished, update, sessions[-1])
                self._commit_in(job.folder, receipt.committed)
                self.commit(receipt.committed)
                return True
            if receipt.reason != "damaged":
                break
            log.warning(
                "the update of %s arrived damaged (attempt %d of %d): %s",
                about, attempt, _ATTEMPTS, receipt.message, extra=OBSERVED,
            )  # fmt: skip
        if not update.secure:  # the round may be repeated, with another secure sum
            finished.drop(update.round)
        # then another process has reported this round; this one has no residuals to keep
        if receipt.reason in ("stale", "duplicate"):
            log.warning("the update of %s came too late: %s", about, receipt.message, extra=OBSERVED)
        else:
            refused = (about, receipt.reason, receipt.message)
            log.error("the server refuses the update of %s (%s): %s", *refused, extra=OBSERVED)
        return False

    def _record_accepted(self, finished: FinishedUpdates, update: Update, session: str) -> None:
        """Record that the server has an update; wait while the disk here is full.

        Raises ClosedError if the node is stopped meanwhile, FederatedError for any other error of the disk. Treated as one that could not be
        sent, the update would be dropped with its residuals, and the client's next one would add those before it once more.
        """
        try:
            retry_while_disk_full(
                partial(finished.accept, update.round, session), f"node {self._node}",
                lambda: self._stopping.wait(DISK_RETRY_INTERVAL_S),
            )  # fmt: skip
        except OSError as error:
            if error.errno in DISK_FULL and self._stopping.is_set():
                raise ClosedError("the node was told to stop") from error
            raise FederatedError(
                f"node {self._node} cannot record that the server has round {update.round} of {update.client}: {error}; start it "
                "again once its disk can be written, it goes on from here"
            ) from error

    def _put(self, update: Update, blobs: FolderStore, raise_if_cancelled: Callable[[], None]) -> None:
        try:
            transfer(update.manifest.blobs, blobs, self._link.blobs, raise_if_cancelled)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LinkError(f"there is no room for the update of {update.client}: {error}") from error

    def _receipt(self, make: Callable[[str], Message], about: str) -> Receipt:
        answer = self._session.send(make)
        if isinstance(answer, Close):
            raise self._session.closed(answer)
        if not isinstance(answer, Receipt):
            raise ProtocolError(f"the server answered {answer.kind!r} to the {about}")
        return answer


def failure_of(job: Job, error: BaseException) -> Failed:
    """Return the message for an error of a job; node and session are filled in when it is sent."""
    client_error = as_client_error(error)
    return Failed(
        node="",
        session="",
        client=job.client,
        round=job.round,
        error=str(client_error),
        retryable=client_error.retryable,
        attempt=job.sum if job.kind == "fit" else None,
    )
