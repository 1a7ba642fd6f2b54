"""Drive the coordinator: clock, journal, held requests, timer and aggregation threads.

`server_run` owns a `Runtime` and executes its tasks; `service` passes nodes' messages to `Runtime.request`. Every event is decided, journaled
and applied, and its commands are executed, under one lock. Aggregations and evaluations run beside it on one thread, so that nodes are
answered meanwhile. Rules are those of ``coordination``; no decision is made here.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from arclight.federated.coordination import events
from arclight.federated.coordination.coordinator import BrokenError, Coordinator, run_to_quiescence
from arclight.federated.coordination.records import Record
from arclight.federated.coordination.run_database import RunDatabase, RunDatabaseError, UnavailableError
from arclight.federated.coordination.run_state import StateSaved
from arclight.federated.disk_full import DISK_FULL_TIMEOUT_S, DISK_RETRY_INTERVAL_S, retry_while_disk_full
from arclight.federated.errors import OBSERVED, FederatedError, LinkError, Reason
from arclight.federated.protocol import Update

log = logging.getLogger(__name__)

Plan = Any
ServerTask = events.Aggregate | events.EvaluateOnServer
_ANSWER_MARGIN_S = 30.0
"""Seconds beyond a request's own wait after which a missing answer is a fault of the server."""
_STALL_S = 0.25
"""Seconds by which the clock may wake too late before that counts as a standstill of this process."""
_MAX_STALLS = 10
"""Standstills of one alarm that are compensated; then time goes on."""


class PausedError(LinkError):
    """Refusal while the server waits for disk space; the node sends again."""


class Runtime:
    """Driver of ``coordinator``; ``execute`` does its aggregations and evaluations.

    What ``execute`` returns is reported to the coordinator.
    after: called once the report of a task is journaled. on_record, on_command: called with every record that was journaled and
    every command, under the lock: they must be quick. disk_full_timeout_s: how long a full disk or locked database is waited for before the run ends.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        database: RunDatabase,
        execute: Callable[[ServerTask], events.Event],
        *,
        after: Callable[[ServerTask], None],
        on_record: Callable[[Record], None],
        on_command: Callable[[events.Command], None],
        disk_full_timeout_s: float = DISK_FULL_TIMEOUT_S,
    ) -> None:
        self.coordinator, self._database, self._execute, self._after = coordinator, database, execute, after
        self._on_record, self._on_command = on_record, on_command
        self._lock = threading.Condition()
        self._names = itertools.count()
        self._answers: dict[str, Plan] = {}
        self._tasks: queue.SimpleQueue[ServerTask | None] = queue.SimpleQueue()
        self._disk_full_timeout_s, self._paused_for, self._paused = disk_full_timeout_s, 0.0, ""
        self._compensated_until, self._stalls = 0.0, 0
        """Time of the run up to which a standstill was compensated, and how many were before it."""
        self._threads: list[threading.Thread] = []
        self._closing, self._left, self._doing = False, False, ""
        self.ended: events.RunOver | None = None
        self.error: BaseException | None = None
        """The error that has ended the run, if any."""

    # -- public methods ----------------------------------------------------------------------------------------------

    def start(self, first: events.Event) -> None:
        """Start with `RunStarted` or `RunResumed`.

        A run that is over stays so, and nodes are notified.
        """
        self.handle(first)
        state = self.coordinator.state
        if state.ended is not None and self.ended is None:
            self.ended = events.RunOver(why=state.ended, failed=state.failed)
        for name, target in (("time", self._keep_time), ("work", self._keep_executing)):
            thread = threading.Thread(target=target, name=f"arclight-server-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def now(self) -> float:
        """Return the run's time in seconds, without waits for a full disk and suspensions."""
        return time.monotonic() - self._paused_for

    def request(self, event: Callable[[str], events.NodeMessage], wait_s: float = 0.0) -> Plan:
        """Handle a node's message; return the answer, held for up to ``wait_s`` seconds.

        Raises PausedError if nothing can be written just now, LinkError if the server stops meanwhile, FederatedError if the
        run has ended by an error.
        """
        to = str(next(self._names))
        with self._lock:
            if self._paused:
                raise PausedError(self._paused)
            self._handle(event(to))
            until = self.now() + wait_s + _ANSWER_MARGIN_S
            while to not in self._answers:
                if self.error is not None:
                    raise FederatedError(f"the server has failed: {self.error}") from self.error
                if self._closing:
                    raise LinkError("the server stops; ask again when it is back")
                self._compensate_for_stall()
                left = until - self.now()
                if left <= 0 and not self._paused:
                    raise FederatedError(f"a request was not answered for {wait_s + _ANSWER_MARGIN_S:g} s: {event(to)}")
                self._lock.wait(max(left, 0.05))
            return self._answers.pop(to)

    def refusal(self, update: Update, digest: str) -> tuple[Reason, str] | None:
        """Return the reason to refuse an update; None for one to validate, or accepted already."""
        with self._lock:
            return self.coordinator.refusal(update.session, update, digest)

    def has_accepted(self, update: Update, digest: str) -> bool:
        """Return True if this very update was accepted already."""
        with self._lock:
            return self.coordinator.accepted(update.client, update.round) == digest

    def clients_of_session(self, session: str) -> Collection[str] | None:
        """Return the clients of a session's node, empty for any; None for an unknown session."""
        with self._lock:
            found = self.coordinator.cluster.sessions.get(session)
            return None if found is None or found.lost is not None else found.clients

    def expected(self, number: int) -> set[str]:
        """Return the clients that were drawn for a round that is not committed and have not failed."""
        with self._lock:
            found = self.coordinator.state.open.get(number)
            return set() if found is None else set(found.drawn) - set(found.failed)

    def bases(self) -> frozenset[str]:
        """Return digests of weights that a client may still start from."""
        with self._lock:
            return self.coordinator.bases()

    def spooled(self) -> set[str]:
        """Return digests of the manifests of updates that are accepted and not aggregated yet."""
        with self._lock:
            state = self.coordinator.state
            return {update.digest for open in state.open.values() for update in open.accepted.values()}

    def oldest(self) -> int:
        """Return the oldest round to which more may happen."""
        with self._lock:
            return self.coordinator.state.oldest

    def recent(self) -> Sequence[tuple[float, float, float]]:
        """Return norm, samples per step and tokens per step of the newest accepted updates."""
        with self._lock:
            return tuple(self.coordinator.state.recent)

    def save(self, write: Callable[[StateSaved], None]) -> None:
        """Replace a long journal by the state that it leads to.

        write: writes the state, and the history read from the journal. Raises RunDatabaseError, and nothing has changed.
        """
        with self._lock:
            if self._database.is_long and self.error is None:
                write(self.coordinator.saved())

    def handle(self, event: events.Event) -> None:
        """Handle an event: decide, journal, apply, execute; repeat until nothing is due."""
        with self._lock:
            self._handle(event)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended; False if it has not within ``timeout`` seconds.

        Also False once `leave` was called. Raises the error that has ended it.
        """
        with self._lock:
            self._lock.wait_for(lambda: self.error is not None or self.ended is not None or self._left, timeout)
            if self.error is not None:
                raise self.error
            return self.ended is not None

    def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition that events bring about; False if it is not met in time.

        Also if it is not met when `leave` is called.
        """
        with self._lock:
            self._lock.wait_for(lambda: true() or self._left, max(0.0, seconds))
            return true()

    def leave(self) -> None:
        """End what waits for the run, which is not over by that."""
        with self._lock:
            self._left = True
            self._lock.notify_all()

    def close(self) -> None:
        """Stop the threads; a task under way is finished first. The journal stays with its opener."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(600)
                if thread.is_alive():
                    raise FederatedError(f"{thread.name} has not ended within 600 s: {self._doing or 'it waits'}")

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        self._lock.wait_for(lambda: not self._paused)  # an event that waits for the disk comes first
        if isinstance(self.error, BrokenError):
            raise self.error
        self._compensate_for_stall()
        try:
            for records, commands in run_to_quiescence(self.coordinator, self._journal_records, event, self.now()):
                for record in records:
                    self._on_record(record)
                for command in commands:
                    self._carry_out(command)
        except BrokenError as error:
            self._fail(error)
            raise
        self._lock.notify_all()

    def _compensate_for_stall(self) -> None:
        """Shift the clock after a suspension, so that nodes are not declared lost for our pause."""
        due, waiting = self.coordinator.next_alarm(), self.coordinator.settings.waiting
        late = 0.0 if due is None else self.now() - due
        if due is None or late <= _STALL_S or self._paused:  # a pause counts by itself
            return
        # Once for one alarm; again if little but a standstill is as late, but not for ever: time goes on however slow this machine is.
        self._stalls = 0 if due >= self._compensated_until else self._stalls
        if self._stalls == 0 or (late > waiting.silence_s / 2 and self._stalls < _MAX_STALLS):
            self._stalls += 1
            if late > waiting.silence_s:
                log.warning(
                    "the server stood still for %.1f s: its nodes have %g s to be heard",
                    late,
                    waiting.silence_s,
                )
            # A request that met the standstill may be given up and sent again: nodes that would be lost get as long as at other times.
            silent = self.coordinator.cluster.awaits_nodes(self.now())
            more = waiting.silence_s if silent else waiting.heartbeat_interval_s
            self._paused_for += late + more
            self._compensated_until = due + more

    def _journal_records(self, records: Sequence[Record]) -> None:
        """Journal records; while that fails, pause the run and its clock, and try again."""
        began, until = time.monotonic(), time.monotonic() + self._disk_full_timeout_s
        while True:
            try:
                self._database.append(records)
                break
            except RunDatabaseError as error:
                if not isinstance(error, UnavailableError) or time.monotonic() > until:
                    self._fail(error)
                    raise
                if not self._paused:
                    log.error("the run pauses until its journal can be written: %s", error)
                self._paused = f"the server waits: {error}"
                self._lock.wait(DISK_RETRY_INTERVAL_S)
        if self._paused:
            self._paused_for += time.monotonic() - began
            self._paused = ""
            log.warning("the journal can be written again: the run continues after %.0f s", time.monotonic() - began)

    def _carry_out(self, command: events.Command) -> None:
        if isinstance(command, events.Answer):
            self._answers[command.to] = command.plan
        elif isinstance(command, ServerTask):
            self._tasks.put(command)
        elif isinstance(command, events.RunOver):
            self.ended = command
        self._on_command(command)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error, self._paused = error, ""
            log.error("the server has failed: %s", error, extra=OBSERVED)  # by whoever waits for the run
        self._lock.notify_all()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        """Tick whenever a timer is due."""
        with self._lock:
            while not self._closing and self.error is None:
                self._compensate_for_stall()
                due = self.coordinator.next_deadline()
                left = None if due is None else due - self.now()
                if left is None or left > 0:
                    self._lock.wait(left)
                    continue
                try:
                    self._handle(events.Tick())
                except Exception as error:  # raised by `wait`
                    self._fail(error)

    def _keep_executing(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._doing = f"{type(task).__name__} of round {task.round}"
            try:
                do = partial(self._execute, task)
                report = retry_while_disk_full(do, self._doing, self._pause, self._disk_full_timeout_s)
                self.handle(report)
                self._after(task)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                    try:
                        self._handle(events.StopRequested(why=f"{self._doing} failed: {error}"))
                    except FederatedError as also:
                        log.error("and nodes could not be told: %s", also)
                return
            self._doing = ""

    def _pause(self) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._closing, DISK_RETRY_INTERVAL_S)
