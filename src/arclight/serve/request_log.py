"""Identify every request, and write one line of JSON about each if asked to."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

log = logging.getLogger("arclight.serve")

HEADER = "X-Request-Id"
_KEY = "arclight.record"
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:+/=-]{1,64}")
_HEADER = HEADER.lower().encode()
MOST_CHARACTERS = 300
"""Characters of a sentence that are written."""


@dataclass
class Record:
    """Facts of one request: its identifier, and what those who answer it add."""

    id: str
    model: str = ""
    """The model that it asks; empty where it asks none."""
    version: str = ""
    """The version that answered."""
    refused: str | None = None
    """The sentence with which it was refused."""


def open_record(scope: MutableMapping[str, Any], model: str) -> Record:
    """Return a new record of the request, and keep it there for `record_of`.

    Its identifier is the one that the client sent, once, of at most 64 letters, digits and ``._:+/=-``; any other is replaced.
    """
    given = [value for name, value in scope["headers"] if name == _HEADER]
    well_formed = len(given) == 1 and _WELL_FORMED.fullmatch(given[0])
    scope[_KEY] = record = Record(given[0].decode() if well_formed else os.urandom(16).hex(), model)
    return record


def record_of(scope: MutableMapping[str, Any]) -> Record:
    """Return the record of a request; one that nobody reads where it has none, as outside of the server's middleware."""
    record: Record = scope.get(_KEY) or Record("")
    return record


class RequestLog:
    """A file to which a thread of its own appends lines: a reader that stalls holds up no request.

    Lines that come while ``MOST_WAITING`` others wait are dropped, and so are those that a full disk does not take; the next one that is
    written says how many, as ``dropped``.
    """

    MOST_WAITING = 10_000
    PAUSE_S = 0.05
    """Between two writes; lines that come meanwhile are written together."""

    def __init__(self, file: str | Path) -> None:
        """Open ``file`` to append to it, "-" for standard output; raises OSError where that is not possible."""
        self.name = str(file)
        self._file = FileIO(os.dup(sys.stdout.fileno()) if self.name == "-" else file, "a")
        self._lines: Queue[dict[str, Any] | None] = Queue(self.MOST_WAITING)
        self._dropped = 0
        """Lines that found no place among those that wait; of the threads of requests."""
        self._lost = 0
        """Lines that could not be written; of the thread that writes."""
        self._has_failed = self._is_cut = False
        self._thread = threading.Thread(target=self._work, name="arclight-request-log", daemon=True)
        self._thread.start()

    def write(
        self, record: Record, *, method: str, route: str, status: int | None, seconds: float, received: int, sent: int
    ) -> None:
        """Write the line of a request that has ended; ``status`` is None where the server ended before an answer."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "method": method[:16],
            "route": route,
            "model": record.model or None,
            "version": record.version or None,
            "status": status,
            "latency_ms": round(seconds * 1000, 3),
            "received_bytes": received,
            "sent_bytes": sent,
            "refused": None if record.refused is None else record.refused[:MOST_CHARACTERS],
        }
        if self._dropped:
            line["dropped"] = self._dropped
        try:
            self._lines.put_nowait(line)
            self._dropped = 0
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits, for a second at most, and end."""
        with suppress(Full):
            self._lines.put(None, timeout=1)
        self._thread.join(1)
        if not self._thread.is_alive():
            self._file.close()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        is_open = True
        while is_open:
            lines: list[dict[str, Any] | None] = [self._lines.get()]
            with suppress(Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            is_open = None not in lines
            self._append([line for line in lines if line is not None])
            if is_open:
                time.sleep(self.PAUSE_S)

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if not lines:
            return
        if self._lost:
            lines[0]["dropped"] = lines[0].get("dropped", 0) + self._lost
        # json writes control characters and all that is not ASCII as escapes: no value can end its line
        text = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if self._is_cut:
            text = b"\n" + text
        left = memoryview(text)
        try:
            while left:
                written = self._file.write(left)
                if written is None:  # a pipe that whoever shares it has made non-blocking, and that is full
                    time.sleep(self.PAUSE_S)
                left = left[written or 0 :]
            self._has_failed = False
        except OSError as error:  # a full disk, or a reader that has gone: requests go on
            if not self._has_failed:
                log.error("the log of requests cannot be written to %s, lines are lost: %s", self.name, error)
            self._has_failed = True
        lost = lines[len(lines) - min(len(lines), bytes(left).count(b"\n")) :]
        self._lost = sum(1 + line.get("dropped", 0) for line in lost)
        if len(left) < len(text):
            self._is_cut = text[len(text) - len(left) - 1] != ord("\n")
