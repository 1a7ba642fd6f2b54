"""``history.jsonl``: what became of each round of a run, a line each, oldest first. It grows by a round at a time.

Its beginning stays as it is; the lines of rounds of which more may be told are written anew at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arclight.checkpoint.remote import place

NAME = "history.jsonl"
_FORMER = "history.json"
"""All rounds in one list, rewritten each round: of runs before 2026-11-22."""
_NUMBER = re.compile(rb'\{"round": (\d+),')
_OPEN = b'"open": true}\n'
"""How the line of a round ends of which more may be told: whoever wrote it may have been killed before the rest."""


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """What became of each round of the run in a folder, whichever version wrote it. Raises FileNotFoundError where there is none."""
    folder = place(run)
    if (folder / NAME).exists():
        return [_told(line) for _, line in _lines(folder / NAME)]
    former: list[dict[str, Any]] = json.loads((folder / _FORMER).read_bytes())
    return former


def has_history(run: str | Path) -> bool:
    folder = place(run)
    return (folder / NAME).exists() or (folder / _FORMER).exists()


def copy_history(source: str | Path, target: str | Path, until: int) -> None:
    """Give another run what became of the rounds up to ``until``; nothing where the source has no such file."""
    file, copy = place(source) / NAME, place(target) / NAME
    if file.exists():
        if isinstance(copy, Path):
            copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"".join(line for number, line in _lines(file) if number <= until))


def _told(line: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(line).items() if name != "open"}


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

    def write(self, settled: str, later: str) -> None:
        """Put text after what stays; ``settled`` stays from now on, ``later`` until the next time."""
        staying = settled.encode()
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.seek(self.stays)
            file.write(staying + later.encode())
            file.truncate()
        self.stays += len(staying)


class HistoryFile:
    """The file of a run that is served."""

    def __init__(self, run: Path) -> None:
        self._file, self._former = GrowingFile(run / NAME), run / _FORMER

    def take_up(self, settled: int, needed: Sequence[int]) -> tuple[set[int], list[dict[str, Any]]]:
        """Go on with what an earlier process has left: numbers of rounds below ``settled``, which stay, and what it says of others.

        needed: rounds that the file must have to be gone on with; else none of it stays, and all is given back.
        """
        numbers, later, end = set[int](), dict[int, bytes](), 0
        for number, line in _lines(self._file.path) if self._file.path.exists() else ():
            if number < settled and not later and not line.endswith(_OPEN):
                numbers.add(number)
                end += len(line)
            else:
                later[number] = line
        if any(number < settled and number not in numbers and number not in later for number in needed):
            return set(), read_history(self._file.path.parent) if has_history(self._file.path.parent) else []
        self._file.stays = end
        return numbers, [json.loads(line) for line in later.values()]

    def settled(self) -> Iterator[dict[str, Any]]:
        """The rounds that stay."""
        left = self._file.stays
        for _, line in _lines(self._file.path) if left else ():
            left -= len(line)
            if left < 0:
                return
            yield json.loads(line)

    def write(self, settled: Sequence[dict[str, Any]], later: Sequence[dict[str, Any]]) -> None:
        """Add rounds that stay from now on, and say anew what is so far known of others."""
        self._file.write(_text(settled), _text([{**one, "open": True} for one in later]))
        self._former.unlink(missing_ok=True)


def _text(rounds: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(one, allow_nan=False) + "\n" for one in rounds)
