"""What came of a node's jobs, on its way to the server: blobs, then the message, until there is a receipt."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.transfer import transfer
from arclight.federated.clients.jobs import Job
from arclight.federated.clients.securing import Securing
from arclight.federated.clients.session import ClosedError, Session, told
from arclight.federated.clients.state import ClientFolder
from arclight.federated.clients.work import addressed
from arclight.federated.errors import CancelledError, FederatedError, LinkError, ProtocolError, RefusedError
from arclight.federated.protocol import Close, Evaluated, Failed, Fit, Message, Receipt, Update

if TYPE_CHECKING:
    from arclight.federated.transports.link import Link

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Times that an update which arrives damaged is sent."""


class Teller:
    """Tells the server what jobs came to. Any number of threads may, of different clients."""

    def __init__(self, node: str, session: Session, link: Link, stopping: threading.Event) -> None:
        self._node, self._session, self._link, self._stopping = node, session, link, stopping
        self._lock = threading.Lock()
        self._committed = -1
        self._keeping = set[ClientFolder]()
        """Of clients whose updates the server has, and may still ask for again."""

    def keeps(self, folder: ClientFolder) -> None:
        """An update that the server has lies in a client's folder."""
        with self._lock:
            self._keeping.add(folder)

    def hear(self, committed: int) -> None:
        """Rounds up to this one are committed: what is kept for them goes, also of clients that are not drawn for long."""
        with self._lock:
            if committed <= self._committed:
                return
            self._committed = committed
            folders, self._keeping = self._keeping, set()
        for folder in folders:
            folder.committed(committed)
            if folder.finished.rounds():
                self.keeps(folder)

    def tell(self, job: Job) -> None:
        """Say a job's outcome. What it raises ends the node: it cannot reach its server, or is not to go on."""
        match job.outcome:
            case Update() as update:
                self.send(job, update, job.folder.finished.blobs(job.round))
            case Evaluated() as evaluated:
                about = f"measurement of {job.client}"
                self._receipt(lambda session: addressed(evaluated, self._node, session), about)
            case Failed() as failed:
                self._receipt(lambda session: addressed(failed, self._node, session), f"failure of {job.client}")

    def tell_masked(self, job: Job, sent: Callable[[], None]) -> None:
        """As `tell`, for an update of a secure sum: clients wait for each other in it. ``sent``: called when its values are there."""
        assert isinstance(job.order, Fit)
        assert isinstance(job.outcome, Update)
        place, finished = job.folder.folder / "masked", job.folder.finished
        securing = Securing(self._node, job.order, self._session.say, self._stopping)
        try:
            masked = securing.masked(job.outcome, finished.blobs(job.round), place)
            if not self.send(job, masked, FolderStore(place)):
                return
        except (ClosedError, LinkError):
            raise
        except Exception as error:  # whatever went wrong with this one's values, the others' go on
            job.outcome = failure_of(job, error)
            log.error("node %s: %s has failed in round %d: %s", self._node, job.client, job.round, error, exc_info=True)
            self.tell(job)
            return
        finally:
            shutil.rmtree(place, ignore_errors=True)
        sent()
        try:
            securing.reveal()
        except (ClosedError, LinkError):
            raise
        except FederatedError as error:
            log.error("node %s: %s gives no parts in round %d: %s", self._node, job.client, job.round, error)

    def send(self, job: Job, update: Update, blobs: FolderStore) -> bool:
        """Put an update's blobs and say so until there is a receipt; then what becomes of it here. Whether it was taken."""
        finished, about = job.folder.finished, f"{update.client}, round {update.round}"

        def wanted() -> None:
            if self._stopping.is_set():
                raise ClosedError("the node was told to stop")
            job.wanted()

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._session.patiently(partial(self._put, update, blobs, wanted))
            except CancelledError as error:
                log.info("node %s does not send the update of %s: %s", self._node, about, error)
                finished.drop(update.round)
                return False
            except RefusedError as error:
                job.outcome = failure_of(job, error)
                self.tell(job)
                receipt = Receipt(accepted=False, reason=error.reason, message=str(error))
                break
            receipt = self._receipt(lambda session: addressed(update, self._node, session), f"update of {about}")
            if receipt.accepted:
                finished.take(update.round)
                job.folder.committed(receipt.committed)
                self.keeps(job.folder)
                self.hear(receipt.committed)
                return True
            if receipt.reason != "damaged":
                break
            log.warning(
                "the update of %s arrived damaged (attempt %d of %d): %s", about, attempt, _ATTEMPTS, receipt.message
            )
        if not update.secure:  # its round may be asked for again, and another sum of it masked
            finished.drop(update.round)
        if receipt.reason in ("stale", "duplicate"):  # of another process's, then: this one leaves nothing unsaid
            log.warning("the update of %s came too late: %s", about, receipt.message)
        else:
            log.error("the server refuses the update of %s (%s): %s", about, receipt.reason, receipt.message)
        return False

    def _put(self, update: Update, blobs: FolderStore, wanted: Callable[[], None]) -> None:
        try:
            transfer(update.manifest.blobs, blobs, self._link.blobs, wanted)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LinkError(f"there is no room for the update of {update.client}: {error}") from error

    def _receipt(self, make: Callable[[str], Message], about: str) -> Receipt:
        answer = self._session.say(make)
        if isinstance(answer, Close):
            raise self._session.closed(answer)
        if not isinstance(answer, Receipt):
            raise ProtocolError(f"the server answered {answer.kind!r} to the {about}")
        return answer


def failure_of(job: Job, error: BaseException) -> Failed:
    """What the server is to know of an error, without node and session."""
    what = told(error)
    return Failed(node="", session="", client=job.client, round=job.round, error=str(what), again=what.again)
