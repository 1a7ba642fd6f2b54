"""A node: the process on a site that asks a server for work, has its clients trained, and sees to it that nothing is lost."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arclight.fabric.replacing import replace_text
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.transfer import transfer
from arclight.federated.clients.crew import Crew, InThisProcess
from arclight.federated.clients.jobs import Job
from arclight.federated.clients.securing import Securing
from arclight.federated.clients.session import ClosedError, Session, told
from arclight.federated.clients.state import Begun, ClientFolder, clients_in, folder_name, read_json
from arclight.federated.clients.work import addressed
from arclight.federated.codecs.downlink import Held as HeldWeights
from arclight.federated.errors import CancelledError, FederatedError, LinkError, ProtocolError, RefusedError
from arclight.federated.protocol import (
    Ask,
    Beat,
    Close,
    Evaluate,
    Failed,
    Fit,
    Held,
    Message,
    Receipt,
    Update,
    Wait,
)

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client
    from arclight.federated.transports.link import Link

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Times that an update which arrives damaged is sent."""
_END = 30.0
_LOOK = 0.5


class Node:
    """Works for a server until it says that the run is over.

    clients: what is trained here, or a `Crew` that trains it. folder: where clients' states, weights and unsent updates lie; a
    node that is started again with it goes on where it was. name: the same after a restart. patience: seconds for which a server
    that is away is tried again. ask: seconds for which the server may hold an ask.
    """

    def __init__(
        self,
        link: Link,
        clients: Sequence[Client] | Crew,
        folder: str | Path,
        name: str,
        *,
        patience: float = 3600.0,
        ask: float = 20.0,
    ) -> None:
        self._crew: Crew = InThisProcess(clients) if isinstance(clients, Sequence) else clients
        self._link, self._folder, self.name, self._ask_for = link, Path(folder), name, ask
        self._stopping, self._lock, self._down = threading.Event(), threading.Condition(), threading.Lock()
        link.heed(self._stopping)
        self._session = Session(link, name, self._crew.clients, self._has, patience, self._stopping)
        self._jobs: dict[str, Job] = {}
        self._folders: dict[str, ClientFolder] = {}
        self._opened, self._committed = "", -1
        self._speed: float | None = None
        self._error: BaseException | None = None
        self.closed = ""
        """Why the server ended the run for this node."""

    @property
    def another(self) -> bool:
        """Whether it ended because the server is at another run now, which a new node may join with the same folder."""
        return self._session.another

    @property
    def failed(self) -> bool:
        """Whether it ended because the run could not go on, or has no place for it."""
        return self._session.failed

    def run(self) -> None:
        """Join, and work until the run is over or `stop` is called. Raises what ended the node otherwise."""
        self._folder.mkdir(parents=True, exist_ok=True)
        threads = [threading.Thread(target=self._beat, name="arclight-beat", daemon=True)]
        threads += [
            threading.Thread(target=self._work, args=(slot,), name=f"arclight-slot-{slot}", daemon=True)
            for slot in range(1, self._crew.slots)
        ]
        try:
            self._begin()
            threads[0].start()
            self._send_what_was_left()
            for thread in threads[1:]:
                thread.start()
            self._work(0)
            for thread in threads:
                thread.join(_END + self._ask_for)
                if thread.is_alive():
                    log.warning("%s of node %s has not ended after %g s", thread.name, self.name, _END + self._ask_for)
        except ClosedError as closed:
            self.closed = str(closed)
        finally:
            self._stopping.set()
            self._session.leave()  # before workers end, which takes seconds
            self._crew.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End soon, in order: what is being trained is broken off, and goes on when the node is started again. From any thread."""
        self._stopping.set()
        with self._lock:
            for job in self._jobs.values():
                job.cancelled = job.cancelled or "the node was told to stop"

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._open(str(read_json(self._folder / "node.json").get("run", "")))
        run = self._session.join().run
        self._open(run)
        replace_text(self._folder / "node.json", json.dumps({"node": self.name, "run": run}))

    def _send_what_was_left(self) -> None:
        for client, folder in self._folders.items():
            for one in folder.account.finished:
                if not one.taken:
                    log.info("node %s sends what client %s had finished of round %d", self.name, client, one.round)
                    with self._job(client, Job(one.round)):
                        self._send(folder, folder.update_of(one), folder.blobs_of(one))

    def _open(self, run: str) -> None:
        """The folders of a run; those of the last one are looked at before anybody says which it is."""
        if not run or self._opened == run:
            return
        self._opened, self._place = run, self._folder / folder_name(run)
        names = self._crew.clients or clients_in(self._place / "clients")
        self._folders = {name: ClientFolder(self._client(name), name, run) for name in names}
        for folder in self._folders.values():  # what was to be masked: its masks have gone with the process
            for one in folder.account.finished:
                if not one.taken and folder.update_of(one).secure:
                    folder.drop(one)
        self._here = FolderStore(self._place / "weights", durable="none")
        self._weights = HeldWeights(self._here, self._link.blobs)
        self._crew.open(self._place / "clients", run)

    def _client(self, name: str) -> Path:
        return self._place / "clients" / folder_name(name)

    def _has(self) -> tuple[list[Held], float | None]:
        return [held for folder in self._folders.values() for held in folder.held()], self._speed

    # -- working -----------------------------------------------------------------------------------------------------

    def _work(self, slot: int) -> None:
        """Ask and do, until the run is over."""
        try:
            store, about = FolderStore(self._place / "slots" / str(slot), durable="none"), ""
            while not self._stopping.is_set():
                answer = self._session.say(lambda session: Ask(node=self.name, session=session, wait=self._ask_for))
                match answer:
                    case Fit():
                        self._fit(answer, store)
                    case Evaluate():
                        self._evaluate(answer, store)
                    case Wait():
                        if answer.about != about:
                            about = answer.about
                            log.info("node %s waits for %s", self.name, about or "work")
                        self._stopping.wait(answer.seconds)
                    case Close():
                        raise self._session.closed(answer)
                    case _:
                        raise ProtocolError(f"the server answered {answer.kind!r} to an ask")
        except ClosedError as closed:
            self.closed = self.closed or str(closed)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self.stop()

    def _fit(self, order: Fit, store: FolderStore) -> None:
        folder = self._folder_of(order)
        with self._job(order.client, Job.of(order)) as job:
            if job is None:
                return
            folder.committed(self._committed)
            update = folder.finished(order)
            if update is None:
                with self._telling(order, job):
                    folder.begin(order)
                    self._session.patiently(partial(self._hand_out, order, store))
                    try:
                        update = self._crew.fit(order, store, job.progress)
                    finally:  # it has been written to where the client is trained
                        folder = self._folders[order.client] = ClientFolder(folder.folder, order.client, order.run)
            if update is not None:
                self._speed = update.steps / max(update.seconds, 1e-3)
                if update.secure:
                    self._send_masked_beside(order, folder, update)
                else:
                    self._send(folder, update, folder.blobs_of(Begun.of(order)))

    def _evaluate(self, order: Evaluate, store: FolderStore) -> None:
        self._folder_of(order)
        with self._job(order.client, Job.of(order)) as job:
            if job is None:
                return
            with self._telling(order, job):
                self._session.patiently(partial(self._hand_out, order, store))
                evaluated = self._crew.evaluate(order, store)
                self._receipt(
                    lambda session: addressed(evaluated, self.name, session), f"measurement of {order.client}"
                )

    def _folder_of(self, order: Fit | Evaluate) -> ClientFolder:
        if order.run != self._session.welcome.run:
            raise ProtocolError(f"an order of run {order.run!r} in run {self._session.welcome.run!r}")
        if order.client not in self._folders:
            if self._crew.clients:
                raise ProtocolError(
                    f"an order for client {order.client!r}; this node has {', '.join(self._crew.clients)}"
                )
            self._folders[order.client] = ClientFolder(self._client(order.client), order.client, order.run)
        return self._folders[order.client]

    @contextmanager
    def _job(self, client: str, job: Job) -> Iterator[Job | None]:
        """What beats name, from the order to the receipt. What else there is to do for the client waits; None if the node stops first."""
        with self._lock:
            while client in self._jobs and not self._stopping.is_set():
                self._lock.wait(_LOOK)
            if self._stopping.is_set():
                job.cancelled = "the node was told to stop"
            else:
                self._jobs[client] = job
        if job.cancelled:
            yield None
            return
        try:
            yield job
        finally:
            self._done(client, job)

    def _done(self, client: str, job: Job) -> None:
        with self._lock:
            if self._jobs.get(client) is job:
                del self._jobs[client]
                self._lock.notify_all()

    def _send_masked_beside(self, order: Fit, folder: ClientFolder, update: Update) -> None:
        """Clients of a secure sum wait for each other: not in this thread, which others of this node may need."""
        with self._lock:
            job = self._jobs[order.client] = Job(order.round, update.steps)
        name = f"arclight-secure-{order.client}"
        threading.Thread(target=self._send_masked, args=(order, folder, update, job), name=name, daemon=True).start()

    def _send_masked(self, order: Fit, folder: ClientFolder, update: Update, job: Job) -> None:
        place, sent = folder.folder / "masked", False
        with self._ending():
            try:
                with self._telling(order, job):
                    securing = Securing(self.name, order, self._session.say, self._stopping)
                    masked = securing.masked(update, folder.blobs_of(Begun.of(order)), place)
                    sent = self._send(folder, masked, FolderStore(place))
                if sent:
                    self._done(order.client, job)
                    securing.reveal()
            except (ClosedError, LinkError):
                raise
            except FederatedError as error:
                log.error("node %s: %s gives no parts in round %d: %s", self.name, order.client, order.round, error)
            finally:
                shutil.rmtree(place, ignore_errors=True)
                self._done(order.client, job)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """What ends a thread of the node ends the node."""
        try:
            yield
        except ClosedError as closed:
            self.closed = self.closed or str(closed)
            self.stop()
        except BaseException as error:
            self._error = self._error or error
            self.stop()

    @contextmanager
    def _telling(self, order: Fit | Evaluate, job: Job) -> Iterator[None]:
        """What goes wrong in a job is told to the server and ends the job, not the node."""
        try:
            yield
        except (ClosedError, LinkError):
            raise
        except CancelledError as error:
            log.info("node %s, client %s, round %d: %s", self.name, order.client, order.round, error)
            if not job.cancelled:
                self._tell_of(order, error)
        except Exception as error:  # whatever a client's own code raises is its own matter
            what = told(error)
            log.error(
                "node %s: client %s has failed in round %d: %s",
                *(self.name, order.client, order.round, what),
                exc_info=True,
            )
            self._tell_of(order, what)

    def _tell_of(self, order: Fit | Evaluate | Update, error: BaseException) -> None:
        what = told(error)

        def failure(session: str) -> Message:
            return Failed(
                node=self.name, session=session, client=order.client, round=order.round, error=str(what), again=what.again
            )  # fmt: skip

        self._receipt(failure, f"failure of {order.client}")

    def _hand_out(self, order: Fit | Evaluate, store: FolderStore) -> None:
        """The order's weights as files in ``store``, where nobody else's orders move them."""
        for other in list(store):
            if other not in order.weights.blobs:
                store.remove(other)
        with self._down:
            self._weights.take(order.weights, order.changes)
            for digest in order.weights.blobs:
                store.adopt(digest, self._here.file(digest))

    # -- telling -----------------------------------------------------------------------------------------------------

    def _send(self, folder: ClientFolder, update: Update, blobs: FolderStore) -> bool:
        """Put an update's blobs and say so until there is a receipt; then what becomes of it here. Whether it was taken."""
        one = Begun(update.round, str(update.manifest.base), update.fragment)
        about = f"{update.client}, round {update.round}"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._session.patiently(partial(transfer, update.manifest.blobs, blobs, self._link.blobs))
            except RefusedError as error:
                self._tell_of(update, error)
                receipt = Receipt(accepted=False, reason=error.reason, message=str(error))
                break
            receipt = self._receipt(lambda session: addressed(update, self.name, session), f"update of {about}")
            if receipt.accepted:
                folder.taken(one)
                folder.committed(max(receipt.committed, self._committed))
                return True
            if receipt.reason != "damaged":
                break
            log.warning(
                "the update of %s arrived damaged (attempt %d of %d): %s", about, attempt, _ATTEMPTS, receipt.message
            )
        folder.drop(one)
        if receipt.reason in ("stale", "duplicate"):  # of another process's, then: this one leaves nothing unsaid
            log.warning("the update of %s came too late: %s", about, receipt.message)
        else:
            log.error("the server refuses the update of %s (%s): %s", about, receipt.reason, receipt.message)
        return False

    def _receipt(self, make: Callable[[str], Message], about: str) -> Receipt:
        answer = self._session.say(make)
        if isinstance(answer, Close):
            raise self._session.closed(answer)
        if not isinstance(answer, Receipt):
            raise ProtocolError(f"the server answered {answer.kind!r} to the {about}")
        return answer

    def _pulse(self, jobs: dict[str, Job], session: str) -> Beat:
        losses = {c: job.loss for c, job in jobs.items() if job.loss is not None and math.isfinite(job.loss)}
        return Beat(node=self.name, session=session, steps={c: job.steps for c, job in jobs.items()}, losses=losses)

    def _beat(self) -> None:
        """Say that the node lives and how far it is, and hear what is no longer wanted."""
        with self._ending():
            while not self._stopping.wait(self._session.welcome.beat_every):
                with self._lock:
                    jobs = dict(self._jobs)
                session = self._session.welcome.session
                answer = self._session.try_to_say(partial(self._pulse, jobs))
                if not isinstance(answer, Receipt):
                    continue
                if answer.reason == "session":
                    self._session.join(lost=session)
                self._committed = max(self._committed, answer.committed)
                for client in answer.cancel:
                    if client in jobs:
                        round = jobs[client].round
                        jobs[client].cancelled = f"the server no longer waits for round {round} of {client}"
