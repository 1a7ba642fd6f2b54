"""The journal: what was said is there again, whatever happened in between."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from arclight.federated.coordination.journal import Journal, JournalError, _encode, read
from arclight.federated.coordination.records import (
    Record,
    RoundClosed,
    RoundOpened,
    RunEnded,
    RunOpened,
    UpdateAccepted,
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
    told=({"round": 4, "norm": None},),
)  # fmt: skip


def test_a_state_that_a_former_version_has_saved_comes_back(tmp_path: Path) -> None:
    """Its fields had other names."""
    line = _encode(0, STATE)
    former = line[9:-1].replace(b'"assigned"', b'"outstanding"').replace(b'"recently_aggregated"', b'"folded"')
    former = former.replace(b'"started_rounds"', b'"begun"').replace(b'"failed_aggregations"', b'"folds_failed"')
    assert former != line[9:-1]
    (tmp_path / "journal").write_bytes(b"%08x %s\n" % (zlib.crc32(former), former))
    assert list(read(tmp_path / "journal")) == [STATE]


def filled(path: Path) -> bytes:
    with Journal.open(path) as journal:
        journal.append(RECORDS[:2])
        for record in RECORDS[2:]:
            journal.append([record])
    return path.read_bytes()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    assert list(read(tmp_path / "journal")) == RECORDS
    with Journal.open(tmp_path / "journal") as journal:
        assert list(journal.records()) == RECORDS
        assert len(journal) == len(RECORDS)
        journal.append([RunEnded(why="more")])
    assert list(read(tmp_path / "journal")) == [*RECORDS, RunEnded(why="more")]


def test_a_journal_cut_at_any_byte_opens_with_the_whole_lines_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = filled(tmp_path / "whole")
    ends = [n + 1 for n, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({*range(0, len(data), 5), *ends, *(end - 1 for end in ends)} - {len(data)}):
        (tmp_path / "cut").write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        caplog.clear()
        with caplog.at_level(logging.WARNING), Journal.open(tmp_path / "cut") as journal:
            assert list(journal.records()) == RECORDS[:whole]
            assert bool(caplog.records) == (not data[:cut].endswith(b"\n") and cut > 0)
            journal.append(RECORDS[whole:])
        assert (tmp_path / "cut").read_bytes() == data


def test_damage_is_refused_and_its_line_named(tmp_path: Path) -> None:
    data = filled(tmp_path / "whole")
    lines = data.splitlines(keepends=True)
    damaged = {
        2: data.replace(b'"ab"', b'"aB"'),
        3: b"".join([*lines[:2], *lines[3:]]),
        1: lines[1] + lines[0] + b"".join(lines[2:]),
    }
    for number, content in damaged.items():
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(JournalError, match=f"line {number} of .* is damaged"):
            Journal.open(tmp_path / "damaged")
        assert (tmp_path / "damaged").read_bytes() == content


def test_what_another_version_wrote_is_refused_with_its_line(tmp_path: Path) -> None:
    class Unknown(Record):
        pass

    with Journal.open(tmp_path / "journal") as journal:
        journal.append([RECORDS[0], Unknown()])
        with pytest.raises(JournalError, match=r"line 2 .* does not know"):
            list(journal.records())


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with Journal.open(tmp_path / "journal") as journal:
        journal.append(RECORDS[:1])
        before = journal.path.read_bytes()
        room = 10

        def full(descriptor: int, data: memoryview) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = real(descriptor, data[:room])
            room -= written
            return written

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(JournalError, match="No space left"):
            journal.append(RECORDS[1:3])
        monkeypatch.undo()
        assert journal.path.read_bytes() == before
        assert len(journal) == 1
        journal.append(RECORDS[1:])
        assert list(journal.records()) == RECORDS


def test_a_disk_that_fails_altogether_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal.open(tmp_path / "journal") as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(JournalError, match="Input/output"):
                journal.append(RECORDS[:1])
        with pytest.raises(JournalError, match="closed"):
            journal.append(RECORDS[:1])


def test_one_process_at_a_time_has_a_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal"), pytest.raises(JournalError, match="in use by another process"):
        Journal.open(tmp_path / "journal")
    Journal.open(tmp_path / "journal").close()


def test_a_journal_begins_with_a_state_and_goes_on(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    with Journal.open(tmp_path / "journal") as journal:
        assert journal.is_long
        journal.begin_with(STATE)
        assert list(journal.records()) == [STATE]
        assert not journal.is_long
        journal.append(RECORDS[1:3])
    with Journal.open(tmp_path / "journal") as journal:
        assert list(journal.records()) == list(read(journal.path)) == [STATE, *RECORDS[1:3]]
        assert len(journal) == len(RECORDS) + 3
        while not journal.is_long:
            journal.append(RECORDS)
        assert len(journal) < 100
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_damaged_state_is_not_taken_for_a_torn_line(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        journal.append(RECORDS[:1])
        journal.begin_with(STATE)
    (tmp_path / "journal").write_bytes((tmp_path / "journal").read_bytes()[:-5])
    with pytest.raises(JournalError, match=r"line 1 of .* is damaged"):
        Journal.open(tmp_path / "journal")


def test_a_journal_that_cannot_begin_anew_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "journal")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal.open(tmp_path / "journal") as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                journal.begin_with(STATE)
        assert [path.name for path in tmp_path.iterdir()] == ["journal"]
        journal.append(RECORDS[:1])
        assert list(journal.records()) == [*RECORDS, RECORDS[0]]


def test_whoever_opened_a_file_that_was_replaced_does_not_have_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "journal", fcntl.flock
    first = Journal.open(path)
    first.append(RECORDS[:1])

    def late(descriptor: int, how: int) -> None:
        """Between the opening and the locking of a second process the first one begins anew, and ends."""
        monkeypatch.setattr(fcntl, "flock", lock)
        first.begin_with(STATE)
        first.close()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Journal.open(path) as second:
        second.append(RECORDS[:1])
        assert list(read(path)) == [STATE, RECORDS[0]]
    with Journal.open(path) as journal:
        journal.begin_with(STATE)
        with pytest.raises(JournalError, match="in use by another process"):
            Journal.open(path)


@pytest.mark.parametrize(("point", "survives"), [("before", 2), ("torn", 2), ("written", 3), ("synced", 3)])
def test_a_process_killed_at_any_point_of_a_write_leaves_all_or_nothing_of_it(
    tmp_path: Path, point: str, survives: int
) -> None:
    program = f"""
import os, signal, sys
from arclight.federated.coordination.journal import Journal
from arclight.federated.coordination.records import RunEnded
def inject(at, line):
    if at == {point!r} and line == 2:
        os.kill(os.getpid(), signal.SIGKILL)
with Journal.open(sys.argv[1], inject=inject) as journal:
    for number in range(4):
        journal.append([RunEnded(why=str(number))])
"""
    with Journal.open(killed(program, tmp_path)) as journal:
        assert list(journal.records()) == [RunEnded(why=str(number)) for number in range(survives)]


@pytest.mark.parametrize("point", ["saving", "half saved", "saved", "replaced"])
def test_a_process_killed_while_it_begins_anew_leaves_the_one_or_the_other(tmp_path: Path, point: str) -> None:
    program = f"""
import os, signal, sys
from arclight.federated.coordination.journal import Journal
from arclight.federated.coordination.records import RunEnded
from arclight.federated.coordination.run_state import RunState, StateSaved
def inject(at, line):
    if at == {point!r} and line == 3:
        os.kill(os.getpid(), signal.SIGKILL)
with Journal.open(sys.argv[1], inject=inject) as journal:
    journal.append([RunEnded(why=str(number)) for number in range(3)])
    journal.begin_with(StateSaved(state=RunState(run="a")))
"""
    with Journal.open(killed(program, tmp_path)) as journal:
        before = [RunEnded(why=str(number)) for number in range(3)]
        assert list(journal.records()) == ([StateSaved(state=RunState(run="a"))] if point == "replaced" else before)
        assert [path.name for path in tmp_path.iterdir()] == ["journal"]
        journal.append(RECORDS)
        assert list(journal.records())[-len(RECORDS) :] == RECORDS


def killed(program: str, folder: Path) -> Path:
    """A journal whose process has died by what the program did."""
    path = folder / "journal"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    return path
