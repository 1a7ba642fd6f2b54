"""The coordinator at work: a clock, a journal, requests that wait, and one thread each for time and for heavy work.

Whatever happens goes through `happen`: it is decided, written to the journal, then done. Only that is under the lock; folds
and checkpoints are made beside it, one at a time, so that nodes are answered meanwhile.
"""

from __future__ import annotations

import errno
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from arclight.federated.coordination import events
from arclight.federated.coordination.coordinator import BrokenError, Coordinator, run_to_quiescence
from arclight.federated.coordination.journal import Journal, JournalError
from arclight.federated.coordination.records import Record
from arclight.federated.errors import FederatedError, LinkError, Reason

log = logging.getLogger(__name__)

Plan = Any
ServerTask = events.Aggregate | events.EvaluateOnServer
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HELD_LONGER = 30.0
"""Seconds beyond an ask's own wait after which an answer that has not come is a fault of ours."""


DISK_RETRY_INTERVAL_S = 0.25
"""Seconds between attempts on a full disk."""
_LATE = 0.25
"""Seconds by which the clock may wake too late before that counts as a standstill of this process."""


DISK_FULL_TIMEOUT_S = 3600.0
"""Seconds for which a full disk is waited for before the run ends."""
T = TypeVar("T")


class PausedError(LinkError):
    """The server waits for room on its disk; ask again."""


class Runtime:
    """Drives ``coordinator``; ``do`` carries out its folds and measurements and returns what came of them.

    after: called when what came of some work is on disk. noted, told: hear every record that was written and every command;
    quick, for they are called under the lock. room_wait: seconds for which a full disk is waited for before the run ends.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        journal: Journal,
        do: Callable[[ServerTask], events.Event],
        *,
        after: Callable[[ServerTask], None],
        noted: Callable[[Record], None],
        told: Callable[[events.Command], None],
        room_wait: float = DISK_FULL_TIMEOUT_S,
    ) -> None:
        self.coordinator, self._journal, self._do, self._after = coordinator, journal, do, after
        self._noted, self._told = noted, told
        self._lock = threading.Condition()
        self._names = itertools.count()
        self._answers: dict[str, Plan] = {}
        self._work: queue.SimpleQueue[ServerTask | None] = queue.SimpleQueue()
        self._room_wait, self._paused_for, self._paused = room_wait, 0.0, ""
        self._excused = 0.0
        """Until which time of the run a standstill has been made up for."""
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.ended: events.RunOver | None = None
        self.error: BaseException | None = None
        """What went wrong here, where something did: the run has ended with it."""

    # -- what callers do ---------------------------------------------------------------------------------------------

    def start(self, first: events.Event) -> None:
        """Begin with `RunStarted` or `RunResumed`; a run that is over stays so, and says it to nodes."""
        self.happen(first)
        state = self.coordinator.state
        if state.ended is not None and self.ended is None:
            self.ended = events.RunOver(why=state.ended, failed=state.failed)
        for name, target in (("time", self._keep_time), ("work", self._keep_working)):
            thread = threading.Thread(target=target, name=f"arclight-server-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def now(self) -> float:
        """Seconds; they stand still while there is no room to write, and while this process does."""
        return time.monotonic() - self._paused_for

    def ask(self, event: Callable[[str], events.Said], wait: float = 0.0) -> Plan:
        """Let a node's event happen and return the answer to it, which may be held for ``wait`` seconds.

        Raises PausedError where nothing can be written just now, LinkError where the server stops meanwhile, and FederatedError
        where the run has ended by an error.
        """
        to = str(next(self._names))
        with self._lock:
            if self._paused:
                raise PausedError(self._paused)
            self._happen(event(to))
            until = self.now() + wait + _HELD_LONGER
            while to not in self._answers:
                if self.error is not None:
                    raise FederatedError(f"the server has failed: {self.error}") from self.error
                if self._closing:
                    raise LinkError("the server stops; ask again when it is back")
                self._excuse()
                left = until - self.now()
                if left <= 0 and not self._paused:
                    raise FederatedError(f"an ask was not answered for {wait + _HELD_LONGER:g} s: {event(to)}")
                self._lock.wait(max(left, 0.05))
            return self._answers.pop(to)

    def refusal(self, session: str, client: str, number: int, digest: str) -> tuple[Reason, str] | None:
        """Why an update need not be looked at; None for one that must be."""
        with self._lock:
            return self.coordinator.refusal(session, client, number, digest)

    def has_taken(self, client: str, number: int, digest: str) -> bool:
        """Whether this very update counts already."""
        with self._lock:
            return self.coordinator.rules.accepted(client, number) == digest

    def speaks_for(self, session: str) -> Collection[str] | None:
        """The clients of the node that is here by that name of its session, empty for any; None where no node is."""
        with self._lock:
            found = self.coordinator.present.sessions.get(session)
            return None if found is None or found.lost is not None else found.clients

    def expected(self, number: int) -> set[str]:
        """Clients that were drawn for a round that is not committed, without those that have failed."""
        with self._lock:
            found = self.coordinator.state.open.get(number)
            return set() if found is None else set(found.drawn) - set(found.failed)

    def bases(self) -> frozenset[str]:
        """Digests of weights that somebody may still be told to begin from."""
        with self._lock:
            return self.coordinator.bases()

    def spooled(self) -> set[str]:
        """Digests of the manifests of updates that are accepted and not folded yet."""
        with self._lock:
            state = self.coordinator.state
            return {update.digest for open in state.open.values() for update in open.accepted.values()}

    def oldest(self) -> int:
        """The oldest round of which more may happen."""
        with self._lock:
            return self.coordinator.state.oldest

    def recent(self) -> Sequence[tuple[float, float, float]]:
        """Norm, samples per step and tokens per step of the newest accepted updates."""
        with self._lock:
            return tuple(self.coordinator.state.recent)

    def save(self, told: Callable[[], Sequence[dict[str, Any]]]) -> None:
        """Where the journal has become long, let it begin with what it has led to. ``told``: writes what else it told of, and gives
        what is not settled of that. Raises OSError where there is no room, and nothing has changed.
        """
        with self._lock:
            if self._journal.is_long and self.error is None:
                self._journal.begin_with(self.coordinator.saved(told()))

    def happen(self, event: events.Event) -> None:
        """Decide, write down, apply, carry out; then whatever follows from it at this moment."""
        with self._lock:
            self._happen(event)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the run has ended; False where it has not within ``timeout`` seconds. Raises what went wrong in it."""
        with self._lock:
            self._lock.wait_for(lambda: self.error is not None or self.ended is not None, timeout)
            if self.error is not None:
                raise self.error
            return self.ended is not None

    def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Wait for something that events bring about; whether it has come."""
        with self._lock:
            return self._lock.wait_for(true, max(0.0, seconds))

    def close(self) -> None:
        """Stop the threads; work under way is finished first. The journal stays with whoever opened it."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._work.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(600)
                if thread.is_alive():
                    raise FederatedError(f"{thread.name} has not ended within 600 s: {self._doing or 'it waits'}")

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _happen(self, event: events.Event) -> None:
        self._lock.wait_for(lambda: not self._paused)  # whoever waits for room has decided something that comes first
        if isinstance(self.error, BrokenError):
            raise self.error
        self._excuse()
        try:
            for records, commands in run_to_quiescence(self.coordinator, self._write, event, self.now()):
                for record in records:
                    self._noted(record)
                for command in commands:
                    self._carry_out(command)
        except BrokenError as error:
            self._fail(error)
            raise
        self._lock.notify_all()

    def _excuse(self) -> None:
        """Where this process stood still, time did, too: what nodes have said meanwhile is heard before they count as silent."""
        due, waiting = self.coordinator.next_alarm(), self.coordinator.settings.waiting
        late = 0.0 if due is None else self.now() - due
        if due is not None and late > _LATE and due >= self._excused and not self._paused:  # a pause counts by itself
            if late > waiting.silence:
                log.warning(
                    "the server stood still for %.1f s: its nodes have %g s to be heard", late, waiting.beat_every
                )
            self._paused_for += late + waiting.beat_every
            self._excused = due + waiting.beat_every  # and once again then at the earliest, so that time goes on

    def _write(self, records: Sequence[Record]) -> None:
        """Wait for room where there is none: until then nothing of the step has happened, and time stands still."""
        began, until = time.monotonic(), time.monotonic() + self._room_wait
        while True:
            try:
                self._journal.append(records)
                break
            except JournalError as error:
                cause = error.__cause__
                full = isinstance(cause, OSError) and cause.errno in DISK_FULL
                if not full or time.monotonic() > until:
                    self._fail(error)
                    raise
                if not self._paused:
                    log.error("the run pauses, and continues when there is space: %s", error)
                self._paused = f"the server waits for room on its disk: {error}"
                self._lock.wait(DISK_RETRY_INTERVAL_S)
        if self._paused:
            self._paused_for += time.monotonic() - began
            self._paused = ""
            log.warning("there is space again: the run continues after %.0f s", time.monotonic() - began)

    def _carry_out(self, command: events.Command) -> None:
        if isinstance(command, events.Answer):
            self._answers[command.to] = command.plan
        elif isinstance(command, ServerTask):
            self._work.put(command)
        elif isinstance(command, events.RunOver):
            self.ended = command
        self._told(command)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error, self._paused = error, ""
            log.error("the server has failed: %s", error)
        self._lock.notify_all()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        """Let time pass."""
        with self._lock:
            while not self._closing and self.error is None:
                self._excuse()
                due = self.coordinator.next_deadline()
                left = None if due is None else due - self.now()
                if left is None or left > 0:
                    self._lock.wait(left)
                    continue
                try:
                    self._happen(events.Tick())
                except Exception as error:  # whoever waits for the run hears of it
                    self._fail(error)

    _doing: str = ""

    def _keep_working(self) -> None:
        while (work := self._work.get()) is not None:
            self._doing = f"{type(work).__name__} of round {work.round}"
            try:
                done = retry_while_disk_full(
                    lambda work=work: self._do(work),  # type: ignore[misc]
                    self._doing,
                    self._pause,
                    self._room_wait,
                )
                self.happen(done)
                self._after(work)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                    try:
                        self._happen(events.StopRequested(why=f"{self._doing} failed: {error}"))
                    except FederatedError as also:
                        log.error("and nodes could not be told: %s", also)
                return
            self._doing = ""

    def _pause(self) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._closing, DISK_RETRY_INTERVAL_S)


def retry_while_disk_full(
    do: Callable[[], T], what: str, pause: Callable[[], bool], seconds: float = DISK_FULL_TIMEOUT_S
) -> T:
    """What ``do`` gives, as soon as a full disk lets it. ``pause``: waits a moment; true where it is not to be tried again.

    Raises the OSError that says where there was no room for so many ``seconds``.
    """
    until, told = time.monotonic() + seconds, False
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in DISK_FULL or time.monotonic() > until:
                raise
            if not told:
                log.error("%s waits, and continues when there is space: %s", what, error)
            told = True
            if pause():
                raise
