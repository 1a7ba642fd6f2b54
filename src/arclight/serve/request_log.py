"""Identify every request, and write one line of JSON about each (``--request-log``).

`middleware` opens a `Record` for each request and writes its line at the end; in between `app` notes the model and `admission` the refusal
(`record_of`). Keys of the lines and the header are public and stay.
"""

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
from random import Random
from typing import Any

log = logging.getLogger("arclight.serve")

HEADER = "X-Request-Id"
_KEY = "arclight.record"
_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:+/=-]{1,64}")
# An identifier is no secret, and a call of the system for each costs more than the rest of a record.
_numbers = Random()
MAX_REFUSAL_CHARACTERS = 300
"""Characters of a refusal that are written."""


@dataclass
class Record:
    """Identifier, model, version and refusal of one request, for its log line."""

    id: str
    model: str = ""
    """The model that it is for; empty without one."""
    version: str = ""
    """The version that answered."""
    refused: str | None = None
    """Text of the refusal; None if it was answered."""


def open_record(scope: MutableMapping[str, Any], given: Sequence[bytes], model: str) -> Record:
    """Make the record of a request, and keep it in its ``scope`` for `record_of`.

    Its identifier is the client's, the X-Request-Id in ``given``, if there is one of at most 64 letters, digits and ``._:+/=-``; else a
    new one.
    """
    well_formed = len(given) == 1 and _WELL_FORMED.fullmatch(given[0])
    scope[_KEY] = record = Record(given[0].decode() if well_formed else f"{_numbers.getrandbits(128):032x}", model)
    return record


def record_of(scope: MutableMapping[str, Any]) -> Record:
    """Return the record of a request.

    Outside of the server's middleware it is a new one, which is not logged.
    """
    record: Record = scope.get(_KEY) or Record("")
    return record


class RequestLog:
    """Request log that appends lines in a thread of its own, delaying no request.

    Lines are dropped while ``MAX_WAITING`` others wait, and if the disk is full; the next line that is written has their number as
    ``dropped``.
    """

    MAX_WAITING = 10_000
    PAUSE_S = 0.05
    """Pause between two writes, to write several lines together."""

    def __init__(self, file: str | Path) -> None:
        """Open ``file`` to append to it, "-" for standard output; raises OSError if that fails."""
        self.name = str(file)
        self._file = FileIO(os.dup(sys.stdout.fileno()) if self.name == "-" else file, "a")
        self._lines: Queue[dict[str, Any] | None] = Queue(self.MAX_WAITING)
        self._dropped = 0
        """Lines that did not fit into the queue; used by the threads of requests."""
        self._lost = 0
        """Lines that could not be written; used by the writing thread."""
        self._has_failed = self._is_cut = False
        self._thread = threading.Thread(target=self._work, name="arclight-request-log", daemon=True)
        self._thread.start()

    def write(
        self, record: Record, *, method: str, route: str, status: int | None, seconds: float, received: int, sent: int
    ) -> None:
        """Queue the log line of a request that has ended.

        ``status`` is None if the server stopped before answering.
        """
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
            "refused": None if record.refused is None else record.refused[:MAX_REFUSAL_CHARACTERS],
        }
        if self._dropped:
            line["dropped"] = self._dropped
        try:
            self._lines.put_nowait(line)
            self._dropped = 0
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the waiting lines, for two seconds at most, and end the thread."""
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
        # json escapes control characters, so that no value contains the end of a line
        text = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if self._is_cut:
            text = b"\n" + text
        left = memoryview(text)
        try:
            while left:
                written = self._file.write(left)
                if written is None:  # a full pipe that another process has made non-blocking
                    time.sleep(self.PAUSE_S)
                left = left[written or 0 :]
            self._has_failed = False
        except OSError as error:  # a full disk or a closed pipe: requests go on
            if not self._has_failed:
                log.error("the log of requests cannot be written to %s, lines are lost: %s", self.name, error)
            self._has_failed = True
        lost = lines[len(lines) - min(len(lines), bytes(left).count(b"\n")) :]
        self._lost = sum(1 + line.get("dropped", 0) for line in lost)
        if len(left) < len(text):
            self._is_cut = text[len(text) - len(left) - 1] != ord("\n")
