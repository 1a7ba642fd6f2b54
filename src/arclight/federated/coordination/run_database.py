"""Keep the journal and the history of a run in one SQLite database, ``run.db``.

`server_run` opens it to write; the report, ``arclight checkpoint`` and ``arclight federate`` read it, also while the run is served. Tables
and columns are public and stay; files of former layouts (``journal.jsonl``, ``history.jsonl``) are still read.

Table ``journal`` holds the last saved state, if any, and the records since. A commit of records is synced to disk before
it is acted on. Table ``history`` holds a row of JSON for each round; rows with ``open`` may still change. They follow from
the records, so they are not synced, unless a saved state replaces the records: both are one commit then.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from arclight.checkpoint import remote
from arclight.federated.coordination import records as kinds
from arclight.federated.coordination.records import Record
from arclight.federated.coordination.run_state import StateSaved
from arclight.federated.errors import FederatedError

log = logging.getLogger(__name__)

NAME = "run.db"
FORMER_JOURNAL, HISTORY_LINES = "journal.jsonl", "history.jsonl"
"""Files of former layouts that are read into a new database; a fork has its history in the second."""
RUN_FILES = (NAME, FORMER_JOURNAL)
"""An opened run has one of these files."""
VERSION = 1
_APPLICATION = 0x41726346
"""SQLite's ``application_id``, by which a run's database is known."""
_SCHEMA = (
    "CREATE TABLE journal (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, record TEXT NOT NULL)",
    "CREATE TABLE history (round INTEGER PRIMARY KEY, open INTEGER NOT NULL, entry TEXT NOT NULL)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)
_ADD_RECORD = "INSERT INTO journal VALUES (?, ?, ?)"
_ADD_ROUND = "INSERT OR REPLACE INTO history VALUES (?, ?, ?)"
_RECORDS = "SELECT number, crc, record FROM journal ORDER BY number"
_ROUNDS = "SELECT entry FROM history WHERE round >= ? ORDER BY round"
_STATE = '{"is":"StateSaved"'
_LOG_PAGES = 200
"""Pages of 4 KiB to which the write-ahead log grows before it is overwritten from its start: that is quicker than to append."""
_LONG = 2
"""The records after a saved state may take this many times its size before a new state is saved."""

Injection = Callable[[str, int], None]
"""Called with the name of a point and the number of the next record: "before", "in" and "after" a commit to "create" the database,
to "append" records, to write "history", and to "save" a state, as in "before append".
"""
HistoryRow = tuple[bool, dict[str, Any]]
"""Whether more may be recorded of a round, and its entry."""
Statement = tuple[str, Iterable[tuple[Any, ...]] | None]


class RunDatabaseError(FederatedError):
    """The database of a run is damaged, in use, or cannot be written."""


class UnavailableError(RunDatabaseError):
    """Error of a database that cannot be written now; nothing has happened: try again."""


class RunDatabase:
    """Open database of a run, see `open`, locked for one process.

    Methods may be called from any thread.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, inject: Injection | None) -> None:
        self.path, self._connection, self._inject = path, connection, inject
        self._lock, self._held = threading.RLock(), ExitStack()
        self._number = self._size = self._state = 0
        self.closed = False

    @classmethod
    def open(cls, folder: str | Path, *, inject: Injection | None = None) -> RunDatabase:
        """Open the database of the run in ``folder``, or create it from files of former layouts.

        Such files stay as they are.
        inject: for tests, called at every point of a commit; it may kill the process there. Raises RunDatabaseError if the
        database is damaged, not of this program, or another process has it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        with ExitStack() as held:
            held.enter_context(locked(folder))
            _check_log(path)
            database = cls(path, held.enter_context(_connected(path, create=True)), inject)
            with _explained(path):
                database._prepare(folder)
            database._held = held.pop_all()
        return database

    def _prepare(self, folder: Path) -> None:
        connection = self._connection
        fresh = not _has_tables(connection, self.path)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise RunDatabaseError(_NO_SHARED_MEMORY.format(path=self.path, error=f"journal mode {mode}"))
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise RunDatabaseError(_DAMAGED.format(what=self.path, error=problem.splitlines()[-1]))
        if fresh:
            records, history = _former(folder)
            tables: list[Statement] = [(sql, None) for sql in _SCHEMA]
            self._commit("create", [*tables, (_ADD_RECORD, records), (_ADD_ROUND, map(_history_row, history))])
        for number, _, text in connection.execute(_RECORDS):
            self._number, self._size = number + 1, self._size + len(text)
            self._state = len(text) if text.startswith(_STATE) else self._state

    def __len__(self) -> int:
        """Return the number of records written so far."""
        return self._number

    @property
    def is_long(self) -> bool:
        """Return True if the records after the saved state are long: it is time to save it."""
        return self._size > (1 + _LONG) * self._state

    def append(self, records: Sequence[Record]) -> None:
        """Append records; all are on disk on return. Raises RunDatabaseError, and nothing is added."""
        rows = [_record_row(self._number + n, encode(record)) for n, record in enumerate(records)]
        if rows:
            self._commit("append", [(_ADD_RECORD, rows)])
            self._number, self._size = self._number + len(rows), self._size + sum(len(text) for *_, text in rows)

    def write_history(self, first: int, rows: Sequence[HistoryRow], state: StateSaved | None = None) -> None:
        """Replace the history from round ``first`` on, and, if given, all records by ``state``.

        With a state it is on the disk on return; without, a power failure may take the rows. Raises RunDatabaseError, and
        nothing is changed.
        """
        changes: list[Statement] = [
            ("DELETE FROM history WHERE round >= ?", [(first,)]),
            (_ADD_ROUND, map(_history_row, rows)),
        ]
        if state is None:
            self._commit("history", changes, durable=False)
            return
        text = encode(state)
        self._commit(
            "save", [*changes, ("DELETE FROM journal", None), (_ADD_RECORD, [_record_row(self._number, text)])]
        )
        self._number, self._size, self._state = self._number + 1, len(text), len(text)

    def records(self) -> list[Record]:
        """Read all records. Raises RunDatabaseError for a damaged one."""
        return [decode(text, self.path) for text in _texts(self._query(_RECORDS), self.path)]

    def history(self, first: int = 0) -> list[dict[str, Any]]:
        """Read the history from round ``first`` on, oldest first."""
        return [json.loads(entry) for (entry,) in self._query(_ROUNDS, first)]

    def last_settled(self) -> int:
        """Return the newest round whose history is final; -1 if there is none."""
        found = self._query("SELECT round FROM history WHERE NOT open ORDER BY round DESC LIMIT 1")
        return int(found[0][0]) if found else -1

    def _query(self, sql: str, *values: int) -> list[Any]:
        with self._lock, _explained(self.path):
            self._check_open()
            return self._connection.execute(sql, values).fetchall()

    def _check_open(self) -> None:
        if self.closed:
            raise RunDatabaseError(f"{self.path} is closed")

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._held.close()

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, what: str, statements: Iterable[Statement], *, durable: bool = True) -> None:
        """Execute statements in one transaction. durable: wait for the disk.

        The write-ahead log is copied into the database only after commits that nobody waits for.
        """
        with self._lock:
            self._check_open()
            connection, begun = self._connection, False
            self._hit(f"before {what}")
            try:
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                connection.execute(f"PRAGMA wal_autocheckpoint = {0 if durable else _LOG_PAGES}")
                connection.execute("BEGIN IMMEDIATE")
                begun = True
                for sql, rows in statements:
                    connection.execute(sql) if rows is None else connection.executemany(sql, rows)
                self._hit(f"in {what}")
                connection.execute("COMMIT")
            except BaseException as error:
                over = begun and not connection.in_transaction
                with suppress(sqlite3.Error):
                    connection.rollback()
                if not isinstance(error, sqlite3.Error | OSError):
                    if over:  # interrupted after its end: the caller does not know that it has happened
                        self.close()
                    raise
                failure = _explain(self.path, error)
                if not isinstance(failure, UnavailableError):
                    self.close()  # what is on the disk is unknown
                raise failure from error
            self._hit(f"after {what}")

    def _hit(self, point: str) -> None:
        if self._inject is not None:
            self._inject(point, self._number)


def has_journal(folder: Path) -> bool:
    """Return True if the folder, maybe at an address, has the journal of a run."""
    return any((folder / name).exists() for name in RUN_FILES)


def has_begun(folder: Path) -> bool:
    """Return True if the journal of the run in ``folder`` has a record.

    A journal that cannot be read counts as begun.
    """
    try:
        return bool(read_journal(folder))
    except FileNotFoundError:
        return False
    except RunDatabaseError:
        return True


def read_journal(folder: Path) -> list[Record]:
    """Read the journal of a run that may be served at this moment, also of a former layout.

    Raises FileNotFoundError if there is none, RunDatabaseError if it is damaged.
    """
    path, former = folder / NAME, folder / FORMER_JOURNAL
    rows = _read(path, _RECORDS) if path.exists() else None
    if rows is None and (former.exists() or not path.exists()):
        return [decode(text, path) for _, text, _ in _former_records(former)]
    return [decode(text, path) for text in _texts(rows or [], path)]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Read the history of a run: being served or not, of a former layout, or at an address.

    Raises FileNotFoundError if there is none, RunDatabaseError if it is damaged.
    """
    path, former = folder / NAME, folder / HISTORY_LINES
    rows = _read(path, _ROUNDS, 0) if path.exists() else None
    if rows is None and (former.exists() or not path.exists()):
        return [entry for _, entry in _former_history(former)]
    return [json.loads(entry) for (entry,) in rows or []]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, and the journal of a former layout, against other servers.

    Raises RunDatabaseError if another process has it.
    """
    import fcntl

    with ExitStack() as held:
        for path in (folder, folder / FORMER_JOURNAL):
            if not path.exists():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunDatabaseError(
                    f"{folder} is in use by another process: only one server at a time may serve a run"
                ) from error
            except OSError as error:
                raise RunDatabaseError(_NO_SHARED_MEMORY.format(path=path, error=error.strerror)) from error
        yield


def encode(record: Record) -> str:
    """Encode a record as JSON."""
    table = {"is": type(record).__name__, **vars(record)}
    return json.dumps(table, default=vars, allow_nan=False, separators=(",", ":"))


def decode(text: str, path: Path) -> Record:
    """Decode a record of the journal at ``path``.

    Raises RunDatabaseError if this version cannot.
    """
    from pydantic import ValidationError

    table = json.loads(text)
    name = table["is"]
    if _kind(name) is None:
        raise RunDatabaseError(f"{path} has a record of a kind that this version does not know: {text[:80]}")
    try:
        # Half a surrogate pair, of a file's name in an error, is no text to a strict reader.
        readable = json.dumps(table, ensure_ascii=False).encode(errors="replace") if "\\ud" in text else text
        record: Record = _adapter(name).validate_json(readable, strict=True)
    except ValidationError as error:
        raise RunDatabaseError(f"{path} has a record that this version cannot read: {error}") from error
    return record


def _kind(name: str) -> type[Record] | None:
    kind = StateSaved if name == StateSaved.__name__ else getattr(kinds, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Record) else None


@cache
def _adapter(name: str) -> Any:
    from pydantic import TypeAdapter

    kind: Any = _kind(name)
    return TypeAdapter(kind)


# -- SQLite --------------------------------------------------------------------------------------------------------------

_DAMAGED = "{what} is damaged ({error}): put back a copy of the file, or fork a new run from one of the complete rounds beside it"
_NO_SHARED_MEMORY = (
    "{path} cannot be opened ({error}): SQLite needs locks and shared memory for a run's database, which network file systems may not "
    "have; put the run on a disk of this machine, and check that it may be written"
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _connected(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """Connect to a database; readers never block a writer.

    Without a log nobody writes in a read-only folder, and it is opened as immutable.
    """
    reader = "rw" if os.access(path.parent, os.W_OK) else "ro" if _size(_log_of(path)) else "ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else reader}"
    with _explained(path):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        yield connection
    finally:
        connection.close()


def _size(path: Path) -> int:
    """Return the size of a file, 0 if there is none.

    Another process may delete it at any moment.
    """
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _log_of(path: Path) -> Path:
    return path.parent / f"{path.name}-wal"


def _check_log(path: Path) -> None:
    if _size(_log_of(path)) and not _size(path):
        raise RunDatabaseError(_DAMAGED.format(what=path, error=f"it is empty, {_log_of(path).name} is not"))


@contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Yield a database where SQLite can read it, if necessary a copy.

    One at an address is copied, and one in a read-only folder with a log and no index.
    """
    log_file, index = _log_of(path), path.parent / f"{path.name}-shm"
    if not remote.is_remote(path) and (index.exists() or not _size(log_file) or os.access(path.parent, os.W_OK)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        for file in (path, log_file):
            if file.exists():
                with file.open("rb") as source, (Path(folder) / file.name).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        yield Path(folder) / path.name


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    """Return False for an empty database.

    Raises RunDatabaseError for one of another program or a newer version.
    """
    ((application,), (version,), (tables,)) = (
        connection.execute(sql).fetchone()
        for sql in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    if application == version == tables == 0:
        return False
    if application != _APPLICATION:
        raise RunDatabaseError(f"{path} is the database of another program: give the run a folder of its own")
    if version > VERSION:
        raise RunDatabaseError(
            f"{path} has layout {version}, and this arclight knows layout {VERSION}: use the version that wrote it"
        )
    return True


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: sqlite3.Error | OSError) -> RunDatabaseError:
    """Return what to raise for an error of SQLite."""
    name = getattr(error, "sqlite_errorname", "")
    nothing = "nothing of this step has happened"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return UnavailableError(f"{path} is locked by another program ({error}): {nothing}; end that program")
    full = isinstance(error, OSError) and error.errno in _NO_ROOM
    if full or name == "SQLITE_FULL" or (name == "SQLITE_IOERR_WRITE" and _is_full(path.parent)):
        return UnavailableError(
            f"{path} cannot be written ({error}): {nothing}; make room: the run continues by itself, or when the server is started again"
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return RunDatabaseError(_DAMAGED.format(what=path, error=error))
    if name.startswith(
        ("SQLITE_CANTOPEN", "SQLITE_PROTOCOL", "SQLITE_IOERR_SHM", "SQLITE_IOERR_LOCK", "SQLITE_READONLY")
    ):
        return RunDatabaseError(_NO_SHARED_MEMORY.format(path=path, error=error))
    return RunDatabaseError(f"{path} cannot be read or written ({error}): {nothing}; check the disk, then start again")


def _is_full(folder: Path) -> bool:
    """Return True if a disk or quota has no room: SQLite calls a full quota an I/O error."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.errno in _NO_ROOM
    return False


def _crc(number: int, text: str) -> int:
    return zlib.crc32(f"{number} {text}".encode())


def _record_row(number: int, text: str) -> tuple[int, int, str]:
    return number, _crc(number, text), text


def _history_row(row: HistoryRow) -> tuple[int, bool, str]:
    more, entry = row
    return entry["round"], more, json.dumps(entry, allow_nan=False)


def _read(path: Path, sql: str, *values: int) -> list[Any] | None:
    """Read rows of a database that may be written at this moment; None if it has no tables yet."""
    _check_log(path)
    with _readable(path) as readable, _connected(readable) as connection, _explained(path):
        return connection.execute(sql, values).fetchall() if _has_tables(connection, path) else None


def _texts(rows: list[tuple[int, int, str]], path: Path) -> list[str]:
    """Return the texts of all records.

    Raises RunDatabaseError for one that is missing or damaged.
    """
    for due, (number, crc, text) in enumerate(rows, rows[0][0] if rows else 0):
        if number != due or crc != _crc(number, text):
            raise RunDatabaseError(_DAMAGED.format(what=f"record {due} of {path}", error="its CRC-32 does not match"))
    return [text for *_, text in rows]


# -- former layouts ------------------------------------------------------------------------------------------------------

_FORMER_FIELDS = {"outstanding": "assigned", "begun": "started_rounds", "folded": "recently_aggregated"}
"""Fields of `RunState` that journals of former versions have under other names."""


def _former(folder: Path) -> tuple[list[tuple[int, int, str]], list[HistoryRow]]:
    """Read journal and history of a former layout; none if there are no such files."""
    records, history = [], dict[int, HistoryRow]()
    if (folder / FORMER_JOURNAL).exists():
        for number, text, notes in _former_records(folder / FORMER_JOURNAL):
            records.append(_record_row(number, text))
            history = {entry["round"]: (True, entry) for entry in notes} or history
    if (folder / HISTORY_LINES).exists():
        history |= {row[1]["round"]: row for row in _former_history(folder / HISTORY_LINES)}
    return records, [history[number] for number in sorted(history)]


def _former_records(path: Path) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
    """Iterate over ``journal.jsonl``: number, text and history notes of each record.

    The notes are of open rounds. A line is ``<CRC-32 of the rest, 8 hexadecimal digits> <number> <record>``. The last
    one may be torn, and was never acted on.
    """
    due = None
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        number, _, body = line[9:-1].partition(b" ")
        begins = number == b"0" or body.startswith(_STATE.encode())
        whole = line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])
        if not whole or (not begins if due is None else number != b"%d" % due):
            if place + 1 < len(lines) or (due is None and _STATE.encode() in line[:60]):
                raise RunDatabaseError(
                    _DAMAGED.format(what=f"line {place + 1} of {path}", error="its CRC-32 does not match")
                )
            log.warning("%s: its last line was being written when its process died, and is left out", path)
            return
        due, table = int(number) + 1, json.loads(body)
        notes = table.pop("told", [])
        if table["is"] == StateSaved.__name__:
            table["state"] = state = {_FORMER_FIELDS.get(name, name): value for name, value in table["state"].items()}
            for open in (*state.get("open", {}).values(), *state.get("started_rounds", {}).values()):
                if "folds_failed" in open:
                    open["failed_aggregations"] = open.pop("folds_failed")
        yield due - 1, json.dumps(table, separators=(",", ":")), notes


def _former_history(path: Path) -> list[HistoryRow]:
    """Read ``history.jsonl`` up to its first damaged line; the journal has later rounds."""
    rows: list[HistoryRow] = []
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
                rows.append((bool(entry.pop("open", False)), {"round": int(entry["round"]), **entry}))
            except (ValueError, TypeError, KeyError, AttributeError):
                log.warning("%s: line %d is damaged, and left out with those after it", path, len(rows) + 1)
                break
    return rows
