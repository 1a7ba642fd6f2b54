"""``history.jsonl``: what became of each round of a run, a line each, oldest first. It grows by a round at a time.

Its beginning stays as it is; the lines of rounds of which more may be told are written anew at its end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arclight.checkpoint.remote import place
from arclight.fabric.replacing import sync_folder

NAME = "history.jsonl"
_NUMBER = re.compile(rb'\{"round": (\d+),')
_OPEN = b'"open": true}\n'
"""How the line of a round ends of which more may be told: whoever wrote it may have been killed before the rest."""


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """What became of each round of the run in a folder. Raises FileNotFoundError where there is none."""
    return [_told(line) for _, line in _lines(place(run) / NAME)]


def has_history(run: str | Path) -> bool:
    return bool((place(run) / NAME).exists())


def copy_history(source: str | Path, target: str | Path, until: int) -> None:
    """Give another run what became of the rounds up to ``until``; nothing where the source has no such file."""
    file, copy = place(source) / NAME, place(target) / NAME
    if file.exists():
        if isinstance(copy, Path):
            copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"".join(line for number, line in _lines(file) if number <= until))


def _told(line: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(line).items() if name != "open"}


def _sound(line: bytes) -> dict[str, Any] | None:
    try:
        return _told(line)
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of each round, without the last line where that was being written."""
    with path.open("rb") as file:
        for line in file:
            match = _NUMBER.match(line)
            if match is None or not line.endswith(b"\n"):
                return
            yield int(match[1]), line


class GrowingFile:
    """A text file whose first ``stays`` bytes are not touched any more."""

    def __init__(self, path: Path, stays: int = 0) -> None:
        self.path, self.stays = path, stays

    def write(self, settled: str, later: str, *, durable: bool = False) -> None:
        """Put text after what stays; ``settled`` stays from now on, ``later`` until the next time. durable: all is on the disk then."""
        staying = settled.encode()
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.seek(self.stays)
            file.write(staying + later.encode())
            file.truncate()
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            sync_folder(self.path.parent)
        self.stays += len(staying)


class HistoryFile:
    """The file of a run that is served."""

    def __init__(self, run: Path) -> None:
        self._file = GrowingFile(run / NAME)

    def take_up(self, settled: int, needed: Sequence[int]) -> tuple[set[int], list[dict[str, Any]]]:
        """Go on with what an earlier process has left: numbers of rounds below ``settled``, which stay, and what it says of others.

        needed: rounds that it must tell of; from the first of them that it does not, nothing stays.
        """
        numbers, later, end = set[int](), list[dict[str, Any]](), 0
        due = sorted({number for number in needed if number < settled}, reverse=True)
        first = due[-1] if due else settled
        for number, line in _lines(self._file.path) if self._file.path.exists() else ():
            told = None if number < first else _sound(line)
            if number >= first and told is None:
                break  # of a power failure, which takes what was written last
            if number >= settled or later or line.endswith(_OPEN) or (due and number > due[-1]):
                later.append(_told(line) if told is None else told)
                continue
            numbers.add(number)
            end += len(line)
            if due and number == due[-1]:
                due.pop()
        self._file.stays = end
        return numbers, later

    def settled(self) -> Iterator[dict[str, Any]]:
        """The rounds that stay."""
        left = self._file.stays
        for _, line in _lines(self._file.path) if left else ():
            left -= len(line)
            if left < 0:
                return
            yield json.loads(line)

    def write(
        self, settled: Sequence[dict[str, Any]], later: Sequence[dict[str, Any]], *, durable: bool = False
    ) -> None:
        """Add rounds that stay from now on, and say anew what is so far known of others."""
        self._file.write(_text(settled), _text([{**one, "open": True} for one in later]), durable=durable)


def _text(rounds: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(one, allow_nan=False) + "\n" for one in rounds)
