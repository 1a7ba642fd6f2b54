"""The database of a run: what was written is there again, whatever happened in between."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from arclight.federated.coordination import run_database
from arclight.federated.coordination.records import (
    Record,
    RoundClosed,
    RoundOpened,
    RunEnded,
    RunOpened,
    UpdateAccepted,
)
from arclight.federated.coordination.run_database import (
    NAME,
    HistoryRow,
    RunDatabase,
    RunDatabaseError,
    UnavailableError,
    encode,
    has_begun,
    read_history,
    read_journal,
)
from arclight.federated.coordination.run_state import RoundEvaluation, RoundState, RunState, StateSaved

RECORDS: list[Record] = [
    RunOpened(run="a", settings="0" * 64),
    RoundOpened(round=1, base="ab", clients=("x", "ü\n"), wanted=2, clock=0, steps=50),
    UpdateAccepted(
        round=1, client="x", digest="cd", samples=3, tokens=4, steps=50, seconds=0.1, bytes=7, norm=1 / 3, metrics={"a": 1e-300}
    ),
    RoundClosed(round=1, clients=("x",)),
    RunEnded(why="done"),
]  # fmt: skip
STATE = StateSaved(
    state=RunState(
        run="a", committed=3, bases={2: "x", 3: "y"}, open={4: RoundState(4, accepted={"x": RECORDS[2]}, closed=("x",))},  # type: ignore[dict-item]
        assigned={4: {"ü": None}}, recently_aggregated={"x": {3: "ab"}}, recent=[(1 / 3, 1e300, 0.0)],
        measuring={3: RoundEvaluation("y", {"x": None}, 2, {"loss": 0.1})},
    ),
)  # fmt: skip
ROUNDS: list[HistoryRow] = [(False, {"round": 0, "norm": 1 / 3}), (True, {"round": 1, "norm": None})]


def filled(folder: Path) -> Path:
    """A run's folder with all records and rounds, closed."""
    with RunDatabase.open(folder) as database:
        database.append(RECORDS[:2])
        for record in RECORDS[2:]:
            database.append([record])
        database.write_history(0, ROUNDS)
    return folder


def held(folder: Path) -> tuple[list[Record], list[dict[str, object]]]:
    with RunDatabase.open(folder) as database:
        return database.records(), database.history()


def as_killed(folder: Path, target: Path) -> Path:
    """A copy of a run's folder as a process leaves it that is killed at this moment."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*-shm")))


def test_records_and_rounds_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert read_journal(tmp_path) == RECORDS
    assert read_history(tmp_path) == [entry for _, entry in ROUNDS]
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "readers leave nothing behind"
    with RunDatabase.open(tmp_path) as database:
        assert database.records() == RECORDS
        assert (len(database), database.last_settled(), database.history(1)) == (5, 0, [ROUNDS[1][1]])
        database.append([RunEnded(why="more")])
        database.write_history(1, [(False, {"round": 1}), (True, {"round": 2})])
        assert database.last_settled() == 1
    assert held(tmp_path) == ([*RECORDS, RunEnded(why="more")], [ROUNDS[0][1], {"round": 1}, {"round": 2}])


def test_each_commit_is_one_wait_for_the_disk_and_rounds_are_none(tmp_path: Path) -> None:
    """As the system counts them; SQLite does not go by Python."""
    program = """
import sys
from arclight.federated.coordination.run_database import RunDatabase
from arclight.federated.coordination.records import RunEnded
with RunDatabase.open(sys.argv[1]) as database:
    open(sys.argv[1] + "/begin", "w").close()
    for number in range(7):
        database.append([RunEnded(why="x"), RunEnded(why="y")])
        database.write_history(0, [(True, {"round": number})])
    open(sys.argv[1] + "/end", "w").close()
"""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not here")
    traced = [strace, "-f", "-e", "trace=fsync,fdatasync,openat", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(traced, check=False, capture_output=True, text=True, timeout=120)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr
    within = done.stderr.partition(f'"{tmp_path}/begin"')[2].partition(f'"{tmp_path}/end"')[0]
    assert within.count("sync(") == 7


def test_a_log_cut_at_any_byte_opens_with_whole_commits(tmp_path: Path) -> None:
    """A power failure takes what was written last, and may leave a part of it or something else in its place."""
    with RunDatabase.open(tmp_path / "run") as database:
        sizes = []
        for record in RECORDS:
            database.append([record])
            sizes.append((tmp_path / "run" / f"{NAME}-wal").stat().st_size)
        whole = as_killed(tmp_path / "run", tmp_path / "whole")
    data = (whole / f"{NAME}-wal").read_bytes()
    assert len(data) == sizes[-1]
    for place in sorted({*range(sizes[0], len(data), 999), *sizes, *(size - 1 for size in sizes[1:])}):
        committed = RECORDS[: sum(size <= place for size in sizes)]
        for number, left in enumerate((data[:place], data[:place] + bytes(len(data) - place))):
            cut = as_killed(whole, tmp_path / f"{place}-{number}")
            (cut / f"{NAME}-wal").write_bytes(left)
            with RunDatabase.open(cut) as database:
                assert database.records() == committed
                database.append(RECORDS[len(committed) :])
            assert held(cut)[0] == RECORDS
            shutil.rmtree(cut)


def test_a_damaged_database_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path / "run") as database:
        database.append([RunEnded(why=str(number) * 100) for number in range(300)])
    data = (tmp_path / "run" / NAME).read_bytes()
    page = 4096
    for name, content in {
        "cut": data[: len(data) // 2],
        "torn": data[:-100],
        "a page of nothing": data[: 4 * page] + bytes(page) + data[5 * page :],
        "no database": b"x" * 5000,
        "another byte": data.replace(b"7" * 99, b"7" * 50 + b"8" + b"7" * 48, 1),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / NAME).write_bytes(content)
        with pytest.raises(RunDatabaseError, match=f"{NAME} is damaged .*put back a copy"):
            held(folder)
        assert (folder / NAME).read_bytes() == content
        with pytest.raises(RunDatabaseError, match=f"{NAME} is damaged"):
            read_journal(folder)
        assert has_begun(folder), "nobody is to remove it"


def test_a_lost_database_whose_log_is_here_is_refused(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path / "run") as database:
        database.append(RECORDS)
        left = as_killed(tmp_path / "run", tmp_path / "left")
    log = (left / f"{NAME}-wal").read_bytes()
    for lose in (lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
        lose(left / NAME)
        with pytest.raises(RunDatabaseError, match=r"is damaged \(it is empty, run.db-wal is not\)"):
            RunDatabase.open(left)
        assert (left / f"{NAME}-wal").read_bytes() == log
        (left / NAME).write_bytes(b"")


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("PRAGMA user_version = 2", "has layout 2, and this arclight knows layout 1: use the version that wrote it"),
        ("PRAGMA application_id = 7", "is the database of another program: give the run a folder of its own"),
    ],
)
def test_databases_of_others_are_refused_and_stay_as_they_are(tmp_path: Path, sql: str, why: str) -> None:
    connection = sqlite3.connect(filled(tmp_path) / NAME)
    connection.execute(sql)
    connection.close()
    content = (tmp_path / NAME).read_bytes()
    for do in (RunDatabase.open, read_journal, read_history):
        with pytest.raises(RunDatabaseError, match=why):
            do(tmp_path)
    assert (tmp_path / NAME).read_bytes() == content


def test_a_name_of_a_file_that_is_no_text_is_read_again(tmp_path: Path) -> None:
    """Errors name files, and names of files may be any bytes."""
    name = os.fsdecode(b"\xff.jpg")
    said = [RunEnded(why=f"{name} and \U0001f4f7 cannot be read"), RunEnded(why="\\ud83d")]
    with RunDatabase.open(tmp_path) as database:
        database.append(said)
        assert database.records() == [RunEnded(why="?.jpg and \U0001f4f7 cannot be read"), said[1]]


def test_records_of_another_version_are_refused(tmp_path: Path) -> None:
    class Unknown(Record):
        pass

    with RunDatabase.open(tmp_path) as database:
        database.append([RECORDS[0], Unknown()])
        with pytest.raises(RunDatabaseError, match=r"does not know: .*Unknown"):
            database.records()


def test_a_file_system_without_shared_memory_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's locks by files are made for such; its log needs more."""
    filled(tmp_path / "filled")
    connect = sqlite3.connect

    def without(address: str, **how: object) -> sqlite3.Connection:
        return connect(f"{address}&vfs=unix-dotfile", **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(sqlite3, "connect", without)
    for folder in (tmp_path / "fresh", tmp_path / "filled"):
        with pytest.raises(RunDatabaseError, match="network file systems may not have; put the run on a disk"):
            RunDatabase.open(folder)
    monkeypatch.undo()
    assert held(tmp_path / "filled")[0] == RECORDS

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(RunDatabaseError, match=r"cannot be opened \(No locks available\)"):
        RunDatabase.open(tmp_path / "filled")


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path), pytest.raises(RunDatabaseError, match="in use by another process"):
        RunDatabase.open(tmp_path)
    RunDatabase.open(tmp_path).close()


def test_readers_see_whole_commits_and_block_nobody(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path) as database:
        database.append(RECORDS[:1])
        reader = sqlite3.connect(f"{(tmp_path / NAME).as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=0)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
        for _ in range(2000):  # longer than the log may be before it is copied into the database
            database.write_history(0, ROUNDS)
        database.append(RECORDS[1:])
        assert reader.execute("SELECT count(*) FROM journal").fetchone() == (1,)
        assert read_journal(tmp_path) == RECORDS
        reader.close()
    assert held(tmp_path)[0] == RECORDS


def test_a_run_in_a_folder_that_may_not_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert read_journal(tmp_path) == RECORDS
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_log_in_a_folder_that_may_not_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed server's run on read-only media: SQLite would make an index of the log beside it."""
    with RunDatabase.open(tmp_path / "run") as database:
        database.append(RECORDS)
        left = as_killed(tmp_path / "run", tmp_path / "left")
    monkeypatch.setattr(os, "access", lambda *_: False)
    names = sorted(path.name for path in left.iterdir())
    assert read_journal(left) == RECORDS
    assert sorted(path.name for path in left.iterdir()) == names == [NAME, f"{NAME}-wal"]
    (left / f"{NAME}-wal").write_bytes(b"")
    read_journal(left)
    assert sorted(path.name for path in left.iterdir()) == names


def test_threads_share_a_database(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path) as database:

        def told() -> None:
            for number in range(100):
                database.write_history(number, [(False, {"round": number})])

        other = threading.Thread(target=told)
        other.start()
        for number in range(50):
            database.append([RunEnded(why=str(number))])
        other.join()
    records, rounds = held(tmp_path)
    assert records == [RunEnded(why=str(number)) for number in range(50)]
    assert rounds == [{"round": number} for number in range(100)]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """SQLite's own limit on the database's pages stands for the disk's."""
    with RunDatabase.open(tmp_path) as database:
        database.append(RECORDS[:1])
        database.write_history(0, ROUNDS)
        database._connection.execute("PRAGMA max_page_count = 4")
        big = [RunEnded(why="x" * 100_000)]
        for attempt in (
            lambda: database.append(big),
            lambda: database.write_history(0, ROUNDS[:1], StateSaved(state=RunState(run="y" * 100_000))),
        ):
            with pytest.raises(
                UnavailableError,
                match=r"full.*nothing of this step has happened; make room: the run continues by itself",
            ):
                attempt()
            assert (database.records(), len(database)) == (RECORDS[:1], 1)
            assert database.history() == [entry for _, entry in ROUNDS]
        database._connection.execute("PRAGMA max_page_count = 1000000")
        database.append(big)
    assert held(tmp_path)[0] == [RECORDS[0], *big]


class Broken:
    """A connection whose commits fail, as SQLite's do."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def execute(self, sql: str, *rest: object) -> object:
        if sql == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = self._name
            raise error
        return self._connection.execute(sql, *rest)

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


def test_a_disk_that_fails_altogether_ends_the_database(tmp_path: Path) -> None:
    database = RunDatabase.open(tmp_path)
    database.append(RECORDS[:1])
    database._connection = Broken(database._connection, "SQLITE_IOERR_FSYNC")  # type: ignore[assignment]
    with pytest.raises(RunDatabaseError, match="I/O error"):
        database.append(RECORDS[1:])
    with pytest.raises(RunDatabaseError, match="closed"):
        database.append(RECORDS[1:])
    assert held(tmp_path)[0] == RECORDS[:1]


@pytest.mark.parametrize("when", ["before its end", "after its end"])
def test_an_interrupted_commit_has_happened_or_not(tmp_path: Path, when: str) -> None:
    class Interrupted(Broken):
        def execute(self, sql: str, *rest: object) -> object:
            if sql == "COMMIT":
                if when == "after its end":
                    self._connection.execute(sql)
                raise KeyboardInterrupt
            return self._connection.execute(sql, *rest)

    with RunDatabase.open(tmp_path) as database:
        database.append(RECORDS[:1])
        real = database._connection
        database._connection = Interrupted(real, "")  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            database.append(RECORDS[1:])
        database._connection = real
        assert database.closed == (when == "after its end"), "whoever asked does not know that it has happened"
        if database.closed:
            with pytest.raises(RunDatabaseError, match=f"{NAME} is closed"):
                database.records()
        else:
            database.append(RECORDS[1:])
    assert held(tmp_path)[0] == RECORDS


def test_a_row_that_cannot_be_encoded_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path) as database:
        with pytest.raises(ValueError, match="not JSON compliant"):
            database.write_history(0, [*ROUNDS, (True, {"round": 2, "norm": float("nan")})])
        database.append(RECORDS)
    assert held(tmp_path) == (RECORDS, [])


@pytest.mark.parametrize(("code", "waits"), [(errno.EDQUOT, True), (errno.ENOSPC, True), (errno.EIO, False)])
def test_a_full_quota_is_distinguished_from_a_broken_disk(
    tmp_path: Path, code: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite calls both an I/O error."""

    def full(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    with RunDatabase.open(tmp_path) as database:
        real = database._connection
        database._connection = Broken(real, "SQLITE_IOERR_WRITE")  # type: ignore[assignment]
        monkeypatch.setattr(run_database.tempfile, "TemporaryFile", full)
        with pytest.raises(RunDatabaseError) as told:
            database.append(RECORDS)
        assert isinstance(told.value, UnavailableError) == waits == (not database.closed)


def test_a_program_that_holds_the_database_is_waited_for(tmp_path: Path) -> None:
    with RunDatabase.open(tmp_path) as database:
        database.append(RECORDS[:1])
        other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        database._connection.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(UnavailableError, match="locked by another program"):
            database.append(RECORDS[1:])
        other.close()
        database.append(RECORDS[1:])
    assert held(tmp_path)[0] == RECORDS


def test_a_journal_is_replaced_by_its_state_and_goes_on(tmp_path: Path) -> None:
    filled(tmp_path)
    with RunDatabase.open(tmp_path) as database:
        assert database.is_long
        database.write_history(1, [(False, {"round": 1, "norm": 2.0})], STATE)
        assert (database.records(), database.is_long) == ([STATE], False)
        database.append(RECORDS[1:3])
    with RunDatabase.open(tmp_path) as database:
        assert database.records() == read_journal(tmp_path) == [STATE, *RECORDS[1:3]]
        assert database.history() == [ROUNDS[0][1], {"round": 1, "norm": 2.0}]
        assert len(database) == len(RECORDS) + 3
        while not database.is_long:
            database.append(RECORDS)
        assert len(database) < 100


class KilledError(BaseException):
    """Stands for the death of the process."""


def through(folder: Path, copies: Path) -> dict[str, Path]:
    """Copies of a run's folder as a kill at each point of its commits leaves it."""
    found: dict[str, Path] = {}

    def inject(point: str, line: int) -> None:
        found[f"{point} {line}"] = as_killed(folder, copies / f"{point} {line}")

    with RunDatabase.open(folder, inject=inject) as database:
        database.append(RECORDS[:2])
        database.write_history(0, ROUNDS)
        database.append(RECORDS[2:])
        database.write_history(1, [(False, {"round": 1, "norm": 2.0})], STATE)
    return found


def test_a_kill_at_any_point_leaves_all_or_nothing_of_a_commit(tmp_path: Path) -> None:
    found = through(tmp_path / "run", tmp_path / "copies")
    before = [entry for _, entry in ROUNDS]
    states: Sequence[tuple[list[Record], list[dict[str, object]]]] = [
        ([], []),
        (RECORDS[:2], []),
        (RECORDS[:2], before),
        (RECORDS, before),
        ([STATE], [before[0], {"round": 1, "norm": 2.0}]),
    ]
    order = ["create 0", "append 0", "history 2", "append 2", "save 5"]
    assert [*found] == [f"{when} {what}" for what in order for when in ("before", "in", "after")], (
        "a commit is not tried"
    )
    for number, what in enumerate(order):
        former = states[number - 1] if number else ([], [])
        for when in ("before", "in", "after"):
            folder = found[f"{when} {what}"]
            expected = states[number] if when == "after" else former
            with RunDatabase.open(folder) as database:
                assert (database.records(), database.history()) == expected, f"{when} {what}"
                database.append(RECORDS)
                assert database.records()[-len(RECORDS) :] == RECORDS


@pytest.mark.parametrize(("point", "survives"), [("before append", 2), ("in append", 2), ("after append", 3)])
def test_a_killed_process_leaves_all_or_nothing_of_a_commit(tmp_path: Path, point: str, survives: int) -> None:
    program = f"""
import os, signal, sys
from arclight.federated.coordination.run_database import RunDatabase
from arclight.federated.coordination.records import RunEnded
def inject(at, line):
    if at == {point!r} and line == 2:
        os.kill(os.getpid(), signal.SIGKILL)
with RunDatabase.open(sys.argv[1], inject=inject) as database:
    for number in range(4):
        database.append([RunEnded(why=str(number))])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    assert held(tmp_path)[0] == [RunEnded(why=str(number)) for number in range(survives)]


# -- former layouts ------------------------------------------------------------------------------------------------------


def line(number: int, text: str) -> bytes:
    rest = b"%d %s" % (number, text.encode())
    return b"%08x %s\n" % (zlib.crc32(rest), rest)


def former(folder: Path, first: int = 0) -> tuple[bytes, bytes]:
    """A run as former versions kept it."""
    folder.mkdir(exist_ok=True)
    journal = b"".join(line(first + number, encode(record)) for number, record in enumerate(RECORDS))
    history = "".join(json.dumps(entry | {"open": True} if more else entry) + "\n" for more, entry in ROUNDS).encode()
    (folder / "journal.jsonl").write_bytes(journal)
    (folder / "history.jsonl").write_bytes(history)
    return journal, history


def test_files_of_a_former_layout_are_read_into_the_database_once(tmp_path: Path) -> None:
    journal, history = former(tmp_path)
    assert read_journal(tmp_path) == RECORDS
    assert read_history(tmp_path) == [entry for _, entry in ROUNDS]
    assert not (tmp_path / NAME).exists(), "whoever reads changes nothing"
    with RunDatabase.open(tmp_path) as database:
        assert (database.records(), len(database), database.last_settled()) == (RECORDS, 5, 0)
        database.append([RunEnded(why="more")])
    assert held(tmp_path) == ([*RECORDS, RunEnded(why="more")], [entry for _, entry in ROUNDS])
    assert (tmp_path / "journal.jsonl").read_bytes() == journal
    assert (tmp_path / "history.jsonl").read_bytes() == history


@pytest.mark.parametrize("point", ["before create", "in create", "after create"])
def test_a_kill_while_a_former_layout_is_read_loses_nothing(tmp_path: Path, point: str) -> None:
    former(tmp_path)

    def inject(at: str, number: int) -> None:
        if at == point:
            raise KilledError

    with pytest.raises(KilledError):
        RunDatabase.open(tmp_path, inject=inject)
    assert (tmp_path / NAME).exists()
    assert has_begun(tmp_path)
    assert (read_journal(tmp_path), read_history(tmp_path)) == (RECORDS, [entry for _, entry in ROUNDS])
    assert held(tmp_path) == (RECORDS, [entry for _, entry in ROUNDS])


def test_a_state_that_a_former_version_has_saved_comes_back(tmp_path: Path) -> None:
    """Its fields had other names, and it told the history of open rounds."""
    text = encode(STATE).removesuffix("}") + ',"told":[{"round":4,"norm":null}]}'
    for today, then in (
        ("assigned", "outstanding"), ("recently_aggregated", "folded"), ("started_rounds", "begun"), ("failed_aggregations", "folds_failed"),
    ):  # fmt: skip
        assert f'"{today}"' in text
        text = text.replace(f'"{today}"', f'"{then}"')
    (tmp_path / "journal.jsonl").write_bytes(line(9, text))
    assert read_journal(tmp_path) == [STATE]
    assert held(tmp_path) == ([STATE], [{"round": 4, "norm": None}])


def test_a_former_journal_cut_at_any_byte_is_read_up_to_its_last_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = former(tmp_path)
    ends = [n + 1 for n, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({*range(0, len(data), 5), *ends, *(end - 1 for end in ends)} - {len(data)}):
        (tmp_path / "journal.jsonl").write_bytes(data[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_journal(tmp_path) == RECORDS[: data[:cut].count(b"\n")]
        assert bool(caplog.records) == (not data[:cut].endswith(b"\n") and cut > 0)


def test_damage_of_a_former_journal_is_refused_and_its_line_named(tmp_path: Path) -> None:
    data, _ = former(tmp_path)
    lines = data.splitlines(keepends=True)
    damaged: dict[int, bytes] = {
        2: data.replace(b'"ab"', b'"aB"'),
        3: b"".join([*lines[:2], *lines[3:]]),
        1: lines[1] + lines[0] + b"".join(lines[2:]),
    }
    for number, content in {**damaged, 1.5: line(3, encode(STATE))[:-5]}.items():
        (tmp_path / "journal.jsonl").write_bytes(content)
        with pytest.raises(RunDatabaseError, match=f"line {int(number)} of .* is damaged"):
            RunDatabase.open(tmp_path)
        assert has_begun(tmp_path), "nobody is to remove it"
        (tmp_path / NAME).unlink()
        assert (tmp_path / "journal.jsonl").read_bytes() == content


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:25] + bytes(5) + data[30:]])
def test_a_damaged_history_is_read_up_to_there(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _, history = former(tmp_path)
    (tmp_path / "history.jsonl").write_bytes(damage(history))
    records, rounds = held(tmp_path)
    assert records == RECORDS
    assert rounds == [entry for _, entry in ROUNDS][: len(rounds)]
    assert len(rounds) < 2
    assert "history.jsonl: line" in caplog.text


def test_a_server_of_a_former_version_keeps_its_run(tmp_path: Path) -> None:
    former(tmp_path)
    with (tmp_path / "journal.jsonl").open("r+b") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(RunDatabaseError, match="in use by another process"):
            RunDatabase.open(tmp_path)
    assert held(tmp_path)[0] == RECORDS
