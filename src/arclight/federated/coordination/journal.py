"""The run's memory: records as lines of JSON, each on disk before anyone acts on it.

A line is ``<CRC-32 of the rest, 8 hexadecimal digits> <number> <record>``. Lines are only ever added. A process that dies while
it writes leaves at most one torn line at the end, which was never acted on and is cut off at the next start. Anything else
that does not fit is damage, and refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from arclight.fabric.replacing import sync_folder
from arclight.federated.coordination import records as kinds
from arclight.federated.coordination.records import Record
from arclight.federated.errors import FederatedError

log = logging.getLogger(__name__)

_KIND = re.compile(rb'\{"is":"(\w+)"')

Injection = Callable[[str, int], None]
"""Called with the name of a point ("before", "torn", "written", "synced") and the number of the first line of that write."""


class JournalError(FederatedError):
    """A journal that is damaged, in use, or cannot be written."""


class Journal:
    """An open journal. Use `open`; one process at a time has it."""

    def __init__(self, path: Path, descriptor: int, lines: int, size: int, inject: Injection | None) -> None:
        self.path = path
        self._file, self._lines, self._size, self._inject = descriptor, lines, size, inject

    @classmethod
    def open(cls, path: str | Path, *, inject: Injection | None = None) -> Journal:
        """The journal at ``path``, made where there is none; a torn last line is cut off.

        inject: for tests, called at every point of a write; it may kill the process there. Raises JournalError where the
        journal is damaged or another process has it.
        """
        path = Path(path)
        fresh = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            if fresh:
                sync_folder(path.parent)
            lines, whole = 0, 0
            for number, _, end in _lines(path):
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
        return cls(path, descriptor, lines, whole, inject)

    def __len__(self) -> int:
        """Lines."""
        return self._lines

    def append(self, records: Sequence[Record]) -> None:
        """Add records; they are on disk, all of them, when this returns. Nothing is added where it raises JournalError."""
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

    def records(self) -> Iterator[Record]:
        """Every record from the first on. Raises JournalError at a damaged line."""
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
        """Cut off what a failed write has left, or use this journal no more: what is on disk is not known then."""
        try:
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        except OSError as error:
            log.error("%s: %s; it is not written to any more by this process", self.path, error)
            self.close()


def read(path: str | Path) -> Iterator[Record]:
    """Records of a journal that may be in use, without its torn last line. Raises JournalError at a damaged line."""
    return (_decode(Path(path), number, body) for number, body, _ in _lines(Path(path)))


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Number, record and end in the file of every whole line."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            end += len(line)
            body = _body(line, number)
            if body is None:
                if file.read(1):
                    raise JournalError(
                        f"line {number + 1} of {path} is damaged, with more after it: this is not what a killed process leaves; "
                        "put back a copy of the file, or fork a new run from one of the complete rounds beside it"
                    )
                return
            yield number, body, end


def _body(line: bytes, number: int) -> bytes | None:
    """The record of a line; None for a torn or damaged one."""
    if not line.endswith(b"\n") or len(line) < 10:
        return None
    rest = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(rest):
        return None
    written, _, body = rest.partition(b" ")
    return body if written == b"%d" % number else None


def _encode(number: int, record: Record) -> bytes:
    said = {"is": type(record).__name__, **vars(record)}
    text = json.dumps(said, allow_nan=False, separators=(",", ":"))
    rest = b"%d %s" % (number, text.encode())
    return b"%08x %s\n" % (zlib.crc32(rest), rest)


def _decode(path: Path, number: int, body: bytes) -> Record:
    from pydantic import ValidationError

    found = _KIND.match(body)
    name = found[1].decode() if found else ""
    kind = getattr(kinds, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise JournalError(f"line {number + 1} of {path} is of a kind that this version does not know: {body[:80]!r}")
    try:
        record: Record = _adapter(name).validate_json(body, strict=True)
    except ValidationError as error:
        raise JournalError(f"line {number + 1} of {path} cannot be read by this version: {error}") from error
    return record


@cache
def _adapter(name: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(getattr(kinds, name))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _lock(descriptor: int, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise JournalError(f"{path} is in use by another process: one server at a time goes on with a run") from error
