"""Show a federated run as it goes on, at a terminal or in a log: a line for each round.

`federated_run` gives a run's records to `Progress`; it and `network` wrap the server in `ObservedServer` to see heartbeats. Only people and tests
read the lines: their wording is free.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from arclight.cli.style import bold, dim, printable
from arclight.federated.coordination import events
from arclight.federated.coordination import records as r
from arclight.federated.protocol import Heartbeat
from arclight.federated.rounds.history import mean_by_samples
from arclight.trainer.callbacks.progress.timing import clock_text
from arclight.trainer.run.curves import number_text
from arclight.trainer.run.report import size_text

if TYPE_CHECKING:
    from arclight.federated.coordination.run_state import RoundState
    from arclight.federated.protocol import Message
    from arclight.federated.transports.link import ServerApi

MAX_NAMED = 4
"""Most clients that a line names; of others it gives the number."""
QUIET_S = 30.0
"""Seconds of silence after which a log names the clients that the round waits for."""
REDRAW_S = 0.5
"""Seconds between two updates of the display."""


@dataclass
class _OpenRound:
    """A round in progress, and what its clients have sent."""

    number: int
    clients: dict[str, None]
    steps: int
    began: float
    done: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, r.UpdateAccepted] = field(default_factory=dict)


class Progress:
    """Print the records of a `Server` and its nodes' heartbeats. Use as a context.

    ``observe`` takes records and commands, as the server's observer; ``observe_heartbeat`` is called by `ObservedServer`.

    A terminal has one line that is redrawn, with the steps of clients that are waited for; everything else is printed once.
    """

    def __init__(self, rounds: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._rounds, self._clock = stream or sys.stdout, rounds, clock
        self._moves = self._stream.isatty()
        self._lock = threading.Lock()
        self._open: dict[int, _OpenRound] = {}
        """Rounds in progress, by number; with streamed rounds there are several."""
        self._failed: dict[tuple[int, str], list[str]] = {}
        """Clients that have just failed, by round and reason. Printed unless the run fails at once, since its error says the same."""
        self._waiting, self._printed_at, self._drawn = "", clock(), ""
        self._metrics: dict[int, dict[str, float]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.sent_down: Callable[[int], int] = lambda number: 0
        """Bytes that nodes have fetched for a round."""

    def __enter__(self) -> Progress:
        self._thread = threading.Thread(target=self._keep, name="arclight-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._print_failed()
            self._clear()

    # -- records and heartbeats -------------------------------------------------------------------------------------------------

    def resume(self, rounds: Iterable[RoundState]) -> None:
        """Show rounds that were under way when the run was resumed."""
        with self._lock:
            for one in rounds:
                here = self._begin(one.round, one.drawn, one.steps)
                here.arrived = {**one.accepted, **here.arrived}

    def observe(self, what: Any) -> None:
        """Show a record of the journal or a command of the coordinator."""
        with self._lock:
            if isinstance(what, r.ClientFailed):
                self._failed.setdefault((what.round, what.message), []).append(what.client)
                if (here := self._open.get(what.round)) is not None:
                    here.arrived.pop(what.client, None)
                return
            if isinstance(what, r.RunEnded) and what.failed:
                self._failed.clear()
            self._print_failed()
            match what:
                case r.RoundOpened():
                    self._waiting = ""
                    self._begin(what.round, what.clients, what.steps)
                case r.UpdateAccepted() if (here := self._open.get(what.round)) is not None:
                    here.arrived[what.client] = what
                case r.UpdateRefused():
                    self._print(f"round {what.round}: client {what.client} is refused ({what.reason}): {what.message}")
                case r.RoundDiscarded():
                    self._print(f"round {what.round} is discarded and repeated: {what.why}")
                    if (here := self._open.get(what.round)) is not None:
                        here.arrived = {}
                case r.RoundSkipped():
                    self._open.pop(what.round, None)
                    self._print(f"round {what.round} is skipped and keeps the weights of the round before: {what.why}")
                case r.RoundCommitted() if (here := self._open.pop(what.round, None)) is not None:
                    self._committed(here, what)
                case r.RoundEvaluated(client=None):
                    values = ", ".join(f"{name} {number_text(value)}" for name, value in what.metrics.items())
                    self._print(
                        f"round {what.round}: {bold(values)}" if values else f"round {what.round}: nothing to evaluate"
                    )
                case events.NodeLost() | events.ClientMoved() | events.ClientNotEvaluated():
                    self._print(str(what))
                case events.LogMessage():
                    self._waiting = what.text
                case _:
                    return
            self._draw()

    def observe_heartbeat(self, beat: Heartbeat) -> None:
        with self._lock:
            for one in beat.active_work:
                here = self._open.get(one.round)
                if one.kind == "fit" and here is not None and one.client in here.clients:
                    here.done[one.client] = one.steps
                    if one.loss is not None:
                        here.losses[one.client] = one.loss

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self._print(text)
            self._draw()

    # -- output -----------------------------------------------------------------------------------------------

    def _begin(self, number: int, clients: tuple[str, ...], steps: int) -> _OpenRound:
        """Start a round, or repeat one: updates that have arrived stay."""
        here = self._open.setdefault(number, _OpenRound(number, {}, steps, self._clock()))
        here.clients = dict.fromkeys(clients)
        return here

    def _print_failed(self) -> None:
        for (number, message), clients in self._failed.items():
            who = f"client{'s' * (len(clients) > 1)} {_named(clients)}"
            self._print(f"round {number}: {who} {'are' if len(clients) > 1 else 'is'} excluded: {message}")
        self._failed.clear()

    def _committed(self, here: _OpenRound, record: r.RoundCommitted) -> None:
        updates = list(here.arrived.values())
        losses = {u.client: u.metrics["train/loss"] for u in updates if "train/loss" in u.metrics}
        loss = mean_by_samples(losses, {u.client: u.samples for u in updates})
        parts = [
            f"train/loss {number_text(loss)}" if loss is not None else "",
            f"{len(updates)} of {len(here.clients)} clients",
            f"{sum(u.steps for u in updates):,} steps",
            f"{size_text(sum(u.bytes for u in updates))} up, {size_text(self.sent_down(here.number))} down",
            f"cosine {sum(record.drift.values()) / len(record.drift):.2f}" if record.drift else "",
            clock_text(self._clock() - here.began),
        ]
        self._waiting = ""
        self._print(f"{bold(f'round {here.number}/{self._rounds}')}  " + "  ".join(part for part in parts if part))

    def _print(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)
        self._printed_at = self._clock()

    def _status(self) -> str:
        """Describe the rounds under way and the clients that they wait for."""
        if not self._open:
            return self._waiting
        first, *later = (self._open[number] for number in sorted(self._open))
        return "  |  ".join([self._of(first), *filter(None, map(self._ahead, later))])

    def _of(self, here: _OpenRound) -> str:
        shares = [self._client_progress(here, client) for client in here.clients if client not in here.arrived]
        waited = f"waiting for client{'s' * (len(shares) > 1)} {_named(shares)}" if shares else "aggregating"
        return f"round {here.number}/{self._rounds}  {waited}"

    def _ahead(self, here: _OpenRound) -> str:
        """Describe a round while an older one is under way; empty for one that nobody has begun."""
        arrived = [f"{len(here.arrived)} of {len(here.clients)} here"] if here.arrived else []
        begun = [x for x in here.clients if here.done.get(x) and x not in here.arrived]
        parts = [*arrived, *([_named([self._client_progress(here, client) for client in begun])] if begun else [])]
        return f"round {here.number}  {', '.join(parts)}" if parts else ""

    @staticmethod
    def _client_progress(here: _OpenRound, client: str) -> str:
        """Describe a client, and its progress once it has begun."""
        done, loss = here.done.get(client, 0), here.losses.get(client)
        begun = f" at {done} of {here.steps}" if done else ""
        return client + begun + (f" (loss {loss:.3f})" if begun and loss is not None else "")

    def _draw(self) -> None:
        if self._moves:
            status = self._status()[: _columns() - 1]
            if status != self._drawn:
                self._clear()
                self._stream.write(dim(status))
                self._stream.flush()
                self._drawn = status

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._drawn = ""

    def _keep(self) -> None:
        while not self._ended.wait(REDRAW_S):
            with self._lock:
                self._print_failed()
                self._draw()
                if not self._moves and self._clock() - self._printed_at > QUIET_S and (status := self._status()):
                    self._print(status)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


@contextmanager
def print_warnings(progress: Progress) -> Iterator[None]:
    """Print the log's warnings among a run's lines, for as long as the block lasts.

    What is logged as ``observed`` is not printed: `Progress` shows the same by a record or command.
    """
    handler, log = _Printed(progress), logging.getLogger("arclight")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Printed(logging.Handler):
    """Print each warning or error as one line; its traceback is in the log file alone."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "observed", False):
            return
        try:
            self._progress.print_line(f"arclight: {printable(record.getMessage())}")
        except Exception:  # whoever logs is a thread of the server, which a lost terminal must not end
            self.handleError(record)


class ObservedServer:
    """Wrap a server so that nodes' heartbeats are seen on their way."""

    def __init__(self, server: ServerApi, progress: Progress) -> None:
        self._server, self._progress, self.blobs = server, progress, server.blobs
        self.reserve_upload, self.run = server.reserve_upload, server.run

    @property
    def largest_message(self) -> int:
        return self._server.largest_message

    def answer(self, message: Message) -> Message:
        if isinstance(message, Heartbeat):
            self._progress.observe_heartbeat(message)
        return self._server.answer(message)
