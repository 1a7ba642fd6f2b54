"""A federated run as it goes on, for a person at a terminal or whoever reads a log later: a line for each round."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from arclight.cli.style import bold, dim
from arclight.federated.coordination import events
from arclight.federated.coordination import records as r
from arclight.federated.protocol import Beat
from arclight.trainer.callbacks.progress_clock import clock_text
from arclight.trainer.curves import number_text
from arclight.trainer.report import size_text

if TYPE_CHECKING:
    from arclight.federated.protocol import Message
    from arclight.federated.transports.in_process import Answers

MOST_NAMED = 4
"""Clients that a line names; of more it says how many."""
QUIET = 30.0
"""Seconds of silence after which a log is told who is waited for."""
EVERY = 0.5


@dataclass
class _Open:
    """A round under way."""

    number: int
    clients: tuple[str, ...]
    steps: int
    began: float
    done: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, r.UpdateAccepted] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)


class Progress:
    """Prints what a `Server` tells (`told`) and what nodes say while they work (`beat`). Use as a context.

    A terminal has one line that moves, with every client's steps; everything else is said once, and then stands.
    """

    def __init__(self, rounds: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._rounds, self._clock = stream or sys.stdout, rounds, clock
        self._moves = self._stream.isatty()
        self._lock = threading.Lock()
        self._open: _Open | None = None
        self._waiting, self._said, self._drawn = "", clock(), ""
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
            self._clear()

    # -- what is heard -------------------------------------------------------------------------------------------------

    def told(self, what: Any) -> None:
        """A record of the journal or a command of the coordinator."""
        with self._lock:
            match what:
                case r.RoundOpened():
                    self._waiting = ""
                    self._open = _Open(what.round, what.clients, what.steps, self._clock())
                case r.UpdateAccepted() if self._is_open(what.round):
                    assert self._open is not None
                    self._open.arrived[what.client] = what
                    self._open.done[what.client] = what.steps
                case r.UpdateRefused():
                    self._say(f"round {what.round}: client {what.client} is refused ({what.reason}): {what.message}")
                case r.ClientFailed():
                    self._say(f"round {what.round}: client {what.client} is left out: {what.message}")
                case r.RoundCommitted() if self._is_open(what.round):
                    self._committed(what)
                case r.RoundEvaluated(client=None):
                    values = ", ".join(f"{name} {number_text(value)}" for name, value in what.metrics.items())
                    self._say(
                        f"round {what.round}: {bold(values)}" if values else f"round {what.round}: nothing to measure"
                    )
                case events.Lost():
                    self._say(f"node {what.node} is lost: {what.why}")
                case events.Moved():
                    self._say(f"round {what.round}: client {what.client} moves from node {what.node} to another")
                case events.Say():
                    self._waiting = what.text
                case _:
                    return
            self._draw()

    def beat(self, beat: Beat) -> None:
        with self._lock:
            if self._open is not None:
                known = set(self._open.clients)
                for one in beat.doing:
                    if one.kind == "fit" and one.round == self._open.number and one.client in known:
                        self._open.done[one.client] = one.steps
                        if one.loss is not None:
                            self._open.losses[one.client] = one.loss

    def say(self, text: str) -> None:
        """A line that stands."""
        with self._lock:
            self._say(text)
            self._draw()

    # -- what is printed -----------------------------------------------------------------------------------------------

    def _is_open(self, number: int) -> bool:
        return self._open is not None and self._open.number == number

    def _committed(self, record: r.RoundCommitted) -> None:
        here = self._open
        assert here is not None
        updates = list(here.arrived.values())
        losses = [u.metrics["train/loss"] for u in updates if "train/loss" in u.metrics]
        parts = [
            f"train/loss {number_text(sum(losses) / len(losses))}" if losses else "",
            f"{len(updates)} of {len(here.clients)} clients",
            f"{sum(u.steps for u in updates):,} steps",
            f"{size_text(sum(u.bytes for u in updates))} up, {size_text(self.sent_down(here.number))} down",
            f"agreement {sum(record.drift.values()) / len(record.drift):.2f}" if record.drift else "",
            clock_text(self._clock() - here.began),
        ]
        self._open, self._waiting = None, ""
        self._say(f"{bold(f'round {here.number}/{self._rounds}')}  " + "  ".join(part for part in parts if part))

    def _say(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)
        self._said = self._clock()

    def _status(self) -> str:
        """Who is at work, and who is waited for."""
        here = self._open
        if here is None:
            return self._waiting
        shares = [self._whereabouts(here, client) for client in here.clients if client not in here.arrived]
        more = f" and {len(shares) - MOST_NAMED} more" if len(shares) > MOST_NAMED else ""
        waited = (
            f"waiting for client{'s' * (len(shares) > 1)} {', '.join(shares[:MOST_NAMED])}{more}"
            if shares
            else "folding"
        )
        return f"round {here.number}/{self._rounds}  {waited}"

    @staticmethod
    def _whereabouts(here: _Open, client: str) -> str:
        """A client, and how far it is where it has begun."""
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
        while not self._ended.wait(EVERY):
            with self._lock:
                self._draw()
                if not self._moves and self._clock() - self._said > QUIET and (status := self._status()):
                    self._say(status)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((120, 24)).columns


class Watched:
    """A server whose nodes' beats are seen on their way."""

    def __init__(self, server: Answers, progress: Progress) -> None:
        self._server, self._progress, self.blobs = server, progress, server.blobs
        self.taking = server.taking

    @property
    def largest_message(self) -> int:
        return self._server.largest_message

    def answer(self, message: Message) -> Message:
        if isinstance(message, Beat):
            self._progress.beat(message)
        return self._server.answer(message)
