"""Write-ahead journal: records as lines of JSON, each on disk before it is acted on.

A line is ``<CRC-32 of the rest, 8 hexadecimal digits> <number> <record>``. Lines are appended, and once they have grown longer than
the state that they lead to, another file takes this one's place, which begins with that state; numbers go on. A process that dies
while it writes leaves at most one torn line at the end, which was never acted on and is cut off at the next start. Anything
else that does not fit is damage, and refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from arclight.fabric.atomic_replace import sync_folder
from arclight.federated.coordination import records as kinds
from arclight.federated.coordination.records import Record
from arclight.federated.coordination.run_state import StateSaved
from arclight.federated.errors import FederatedError

log = logging.getLogger(__name__)

_KIND = re.compile(rb'\{"is":"(\w+)"')
_BEGINS = re.compile(rb'\{"is":"StateSaved"')
_LONG = 2
"""Times a state's size that the records after it may have."""

Injection = Callable[[str, int], None]
"""Called with the name of a point and the number of the first line of that write. Points are "before", "torn", "written", "synced",
and where the file is replaced "saving", "half saved", "saved" and "replaced".
"""


class JournalError(FederatedError):
    """The journal is damaged, in use, or cannot be written."""


class Journal:
    """An open journal. Use `open`; one process at a time holds its lock."""

    def __init__(
        self, path: Path, descriptor: int, lines: int, size: int, state: int, inject: Injection | None
    ) -> None:
        """state: bytes of its first line if that is a state, else 0."""
        self.path = path
        self._file, self._lines, self._size, self._state, self._inject = descriptor, lines, size, state, inject

    @classmethod
    def open(cls, path: str | Path, *, inject: Injection | None = None) -> Journal:
        """Open the journal at ``path``, or create it; a torn last line is cut off.

        inject: for tests, called at every point of a write; it may kill the process there. Raises JournalError if the
        journal is damaged or another process has it.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
        try:
            _coming(path).unlink(missing_ok=True)
            lines, whole, state = 0, 0, 0
            for number, body, end in _lines(path):
                state = end if not whole and _BEGINS.match(body) else state
                lines, whole = number + 1, end
            if (size := os.fstat(descriptor).st_size) > whole:
                log.warning(
                    "%s: the last %d bytes were being written when its process died; they are cut off",
                    path,
                    size - whole,
                )
                os.ftruncate(descriptor, whole)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, lines, whole, state, inject)

    def __len__(self) -> int:
        """Return the number of records written so far."""
        return self._lines

    @property
    def is_long(self) -> bool:
        """Return True if the records after the saved state are long: it is time for `begin_with`."""
        return self._size > (1 + _LONG) * self._state

    def append(self, records: Sequence[Record]) -> None:
        """Append records; all are on disk on return. Raises JournalError, and nothing is added."""
        if not records:
            return
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        data = b"".join(_encode(self._lines + n, record) for n, record in enumerate(records))
        try:
            self._hit("before")
            if self._inject is not None:  # in two parts, so that a process can die between them
                half = max(1, len(data) // 2)
                _write(self._file, data[:half])
                self._hit("torn")
                _write(self._file, data[half:])
            else:
                _write(self._file, data)
            self._hit("written")
            os.fsync(self._file)
            self._hit("synced")
        except OSError as error:
            self._take_back()
            raise JournalError(
                f"{self.path} cannot be written ({error.strerror}): nothing of this step has happened; make room and start the "
                "server again, it goes on from here"
            ) from error
        self._lines += len(records)
        self._size += len(data)

    def begin_with(self, state: StateSaved) -> None:
        """Replace all records so far by a state, atomically.

        Raises OSError if that cannot be written, and the journal is as it was.
        """
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        data, new = _encode(self._lines, state), _coming(self.path)
        self._hit("saving")
        descriptor = os.open(new, _FLAGS | os.O_TRUNC, 0o644)
        try:
            _lock(descriptor, self.path)
            _write(descriptor, data[: len(data) // 2])
            self._hit("half saved")
            _write(descriptor, data[len(data) // 2 :])
            os.fsync(descriptor)
            self._hit("saved")
            new.replace(self.path)
        except BaseException:
            os.close(descriptor)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._size, self._state = descriptor, len(data), len(data)
        self._hit("replaced")
        self._lines += 1
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            self.close()
            raise JournalError(
                f"{self.path} was replaced, maybe not on the disk ({error}): start the server again"
            ) from error

    def records(self) -> Iterator[Record]:
        """Iterate over the records of the file. Raises JournalError for a damaged line."""
        return (_decode(self.path, number, body) for number, body, _ in _lines(self.path))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hit(self, point: str) -> None:
        if self._inject is not None:
            self._inject(point, self._lines)

    def _take_back(self) -> None:
        """Truncate a failed write, or close the journal: its content on disk is unknown then."""
        try:
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        except OSError as error:
            log.error("%s: %s; it is not written to any more by this process", self.path, error)
            self.close()


def read(path: str | Path) -> Iterator[Record]:
    """Read a journal that may be in use, without a torn last line. Raises JournalError for a damaged line."""
    return (_decode(Path(path), number, body) for number, body, _ in _lines(Path(path)))


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Iterate over number, record and end offset of every whole line."""
    end, due = 0, None
    with path.open("rb") as file:
        for place, line in enumerate(file):
            end += len(line)
            number, body = _parts(line)
            begins = number == 0 or _BEGINS.match(body) is not None
            if number < 0 or (not begins if due is None else number != due):
                if file.read(1) or (due is None and _BEGINS.search(line[:60])):
                    raise JournalError(
                        f"line {place + 1} of {path} is damaged: this is not what a killed process leaves; put back a copy of the "
                        "file, or fork a new run from one of the complete rounds beside it"
                    )
                return
            yield number, body, end
            due = number + 1


def _parts(line: bytes) -> tuple[int, bytes]:
    """Return number and record of a line; -1 if it is torn or damaged."""
    rest = line[9:-1]
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(rest):
        return -1, b""
    number, _, body = rest.partition(b" ")
    return (int(number), body) if number.isdigit() else (-1, b"")


def _encode(number: int, record: Record) -> bytes:
    said = {"is": type(record).__name__, **vars(record)}
    text = json.dumps(said, default=vars, allow_nan=False, separators=(",", ":"))
    rest = b"%d %s" % (number, text.encode())
    return b"%08x %s\n" % (zlib.crc32(rest), rest)


def _decode(path: Path, number: int, body: bytes) -> Record:
    from pydantic import ValidationError

    found = _KIND.match(body)
    name = found[1].decode() if found else ""
    if _kind(name) is None:
        raise JournalError(f"line {number + 1} of {path} is of a kind that this version does not know: {body[:80]!r}")
    try:
        text = _with_todays_names(body) if name == StateSaved.__name__ else body
        record: Record = _adapter(name).validate_json(text, strict=True)
    except ValidationError as error:
        raise JournalError(f"line {number + 1} of {path} cannot be read by this version: {error}") from error
    return record


_FORMER_FIELDS = {"outstanding": "assigned", "begun": "started_rounds", "folded": "recently_aggregated"}
"""Fields of `RunState` that journals of former versions have under other names."""


def _with_todays_names(body: bytes) -> bytes:
    """Rename the fields of a saved state that a former version has written."""
    said = json.loads(body)
    state = said["state"]
    if not _FORMER_FIELDS.keys() & state.keys():
        return body
    said["state"] = state = {_FORMER_FIELDS.get(name, name): value for name, value in state.items()}
    for open in (*state.get("open", {}).values(), *state.get("started_rounds", {}).values()):
        if "folds_failed" in open:
            open["failed_aggregations"] = open.pop("folds_failed")
    return json.dumps(said, separators=(",", ":")).encode()


def _kind(name: str) -> type[Record] | None:
    kind = StateSaved if name == StateSaved.__name__ else getattr(kinds, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Record) else None


@cache
def _adapter(name: str) -> Any:
    from pydantic import TypeAdapter

    kind: Any = _kind(name)
    return TypeAdapter(kind)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def _coming(path: Path) -> Path:
    """Return the path of the file that is to replace a journal."""
    return path.with_name(f"{path.name}.new")


def _opened(path: Path) -> int:
    """Open and lock the journal's file, and create it if needed; again if it was replaced meanwhile."""
    while True:
        fresh = not path.exists()
        descriptor = os.open(path, _FLAGS, 0o644)
        try:
            _lock(descriptor, path)
            if fresh:
                sync_folder(path.parent)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _lock(descriptor: int, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(f"{path} is in use by another process: only one server at a time may serve a run") from error
