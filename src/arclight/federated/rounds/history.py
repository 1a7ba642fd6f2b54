"""Keep the history of a run: ``history.jsonl``, a line each round, oldest first, and ``metrics.csv``.

Its beginning stays as it is; the lines of rounds of which more may be told are written anew at its end.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from arclight.checkpoint.remote import to_path
from arclight.fabric import atomic_replace
from arclight.fabric.atomic_replace import sync_folder
from arclight.federated.coordination import records as r
from arclight.federated.coordination.run_state import StateSaved

NAME = "history.jsonl"
_NUMBER = re.compile(rb'\{"round": (\d+),')
_OPEN = b'"open": true}\n'
"""How the line of a round ends of which more may be told: whoever wrote it may have been killed before the rest."""


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """Read the history of the run in a folder. Raises FileNotFoundError if it has none."""
    return [_told(line) for _, line in _lines(to_path(run) / NAME)]


def has_history(run: str | Path) -> bool:
    return bool((to_path(run) / NAME).exists())


def copy_history(source: str | Path, target: str | Path, until: int) -> None:
    """Copy the history of rounds up to ``until`` to another run; nothing if the source has none."""
    file, copy = to_path(source) / NAME, to_path(target) / NAME
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
    """Iterate over number and text of each round, without a last line that is incomplete."""
    with path.open("rb") as file:
        for line in file:
            match = _NUMBER.match(line)
            if match is None or not line.endswith(b"\n"):
                return
            yield int(match[1]), line


class GrowingFile:
    """A text file whose first ``stays`` bytes no longer change."""

    def __init__(self, path: Path, stays: int = 0) -> None:
        self.path, self.stays = path, stays

    def write(self, settled: str, later: str, *, durable: bool = False) -> None:
        """Write text after what stays; ``settled`` stays from now on, ``later`` until the next call. durable: sync it."""
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
    """The history file of a run that is being served."""

    def __init__(self, run: Path) -> None:
        self._file = GrowingFile(run / NAME)

    def take_up(self, settled: int, needed: Sequence[int]) -> tuple[set[int], list[dict[str, Any]]]:
        """Continue an earlier process's file: return its rounds below ``settled``, and the content of later ones.

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
        """Iterate over the rounds that no longer change."""
        left = self._file.stays
        for _, line in _lines(self._file.path) if left else ():
            left -= len(line)
            if left < 0:
                return
            yield json.loads(line)

    def write(
        self, settled: Sequence[dict[str, Any]], later: Sequence[dict[str, Any]], *, durable: bool = False
    ) -> None:
        """Append rounds that no longer change, and rewrite those that may."""
        self._file.write(_text(settled), _text([{**one, "open": True} for one in later]), durable=durable)


def _text(rounds: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(one, allow_nan=False) + "\n" for one in rounds)


Row = dict[str, Any]


class MetricsCsv:
    """Append rows to ``metrics.csv``; a new column rewrites the file. before: returns the rows added so far."""

    def __init__(self, path: Path, before: Callable[[], Iterable[Row]]) -> None:
        self._file, self._before = GrowingFile(path), before
        self._columns: list[str] = []

    def write(self, settled: Sequence[Row], later: Sequence[Row]) -> None:
        """Append rows that no longer change, and rewrite those that may."""
        if {name for row in (*settled, *later) for name in row} <= set(self._columns):
            self._file.write(self._text(settled), self._text(later))
            return
        columns = dict.fromkeys(name for rows in (self._before(), settled, later) for row in rows for name in row)
        self._columns = list(columns)
        temporary = atomic_replace.temporary_path(self._file.path)
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, self._columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self._before())
                writer.writerows(settled)
                stays = file.tell()
                writer.writerows(later)
            temporary.replace(self._file.path)
            self._file.stays = stays
        finally:
            atomic_replace.discard(temporary)

    def forget(self) -> None:
        """Rewrite the whole file at the next call."""
        self._columns = []

    def _text(self, rows: Sequence[Row]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()


log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Round:
    """The history of one round. Bytes and seconds are by client or phase."""

    round: int
    clock: int = 0
    """Optimizer steps of the run up to the round's weights."""
    base: str = ""
    """Digest of the manifest of the weights that came of it."""
    contributors: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    norm: float | None = None
    """L2 norm of the mean change."""
    norms: dict[str, float] = field(default_factory=dict)
    """L2 norm of each client's change."""
    drift: dict[str, float] = field(default_factory=dict)
    """Cosine of each client's change with the mean."""
    noise_scale: float | None = None
    """Simple noise scale, in samples."""
    epsilon: float | None = None
    """Privacy spent up to this round, with noise."""
    train: dict[str, dict[str, float]] = field(default_factory=dict)
    """Logged values of training by client."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the evaluation: the server's own, or the clients' weighed by samples."""
    metrics_by_client: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: round (opened to committed), waiting (opened to closed), fold (with the server's step and its checkpoint), evaluate."""
    seconds_by_client: dict[str, float] = field(default_factory=dict)
    """Of training, without transfers."""
    refused: list[dict[str, str]] = field(default_factory=list)
    """Client, reason and message of each update that was not taken."""
    failed: dict[str, str] = field(default_factory=dict)
    """Clients that are out of the round, and why."""
    discarded: list[str] = field(default_factory=list)
    """Why updates of the round were of no use, each time that it was asked for again."""
    skipped: str = ""
    """Why the round was skipped, if it was: its weights are those of the round before."""

    @property
    def loss(self) -> float | None:
        """Return the validation loss if measured, else the mean of the clients' training losses, by samples."""
        return _loss(self.metrics, self.train, self.samples)

    @property
    def train_loss(self) -> float | None:
        return _loss({}, self.train, self.samples)


def loss_of(entry: Mapping[str, Any]) -> float | None:
    """Return `Round.loss` of a round as a checkpoint keeps it."""
    return _loss(entry.get("metrics", {}), entry.get("train", {}), entry.get("samples", {}))


def _loss(
    metrics: Mapping[str, float], train: Mapping[str, Mapping[str, float]], samples: Mapping[str, int]
) -> float | None:
    measured = next((value for name, value in metrics.items() if name == "loss" or name.endswith("/loss")), None)
    if measured is not None:
        return measured
    losses = {client: values["train/loss"] for client, values in train.items() if "train/loss" in values}
    weight = sum(samples.get(client, 0) for client in losses)
    return math.fsum(v * samples.get(c, 0) for c, v in losses.items()) / weight if weight else None


_OF_UPDATES = ("samples", "tokens", "steps", "norms", "train")
"""What a round tells of the updates that count."""
_SEEN_HERE = ("bytes_down", "seconds", "noise_scale", "epsilon")


class History:
    """Build the history from records, noted in the journal's order. Thread-safe.

    Those of which more may be told are in memory, others in the files of the run's ``folder`` alone.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.RLock()
        self._rounds: dict[int, Round] = {}
        self._settled: frozenset[int] | set[int] = frozenset()
        """Rounds that an earlier process has told to the end, while the journal is gone through."""
        self._over = 0
        """Rounds below this have been told to their end."""
        self._file = HistoryFile(folder)
        self._table = MetricsCsv(folder / "metrics.csv", lambda: (_row(_round(told)) for told in self._file.settled()))

    @property
    def rounds(self) -> list[Round]:
        """Return all rounds, read from the file."""
        with self._lock:
            return [*map(_round, self._file.settled()), *self._in_memory()]

    def at(self, number: int) -> Round:
        """Return a round, to be added to. A round that no longer changes is not kept."""
        with self._lock:
            return Round(round=number) if number < self._over else self._rounds.setdefault(number, Round(round=number))

    def told(self, number: int) -> dict[str, Any]:
        """Return a round as JSON values."""
        with self._lock:
            return asdict(self.at(number))

    def took(self, number: int, phase: str, seconds: float) -> None:
        with self._lock:
            self.at(number).seconds[phase] = seconds

    def sent(self, number: int, client: str, size: int) -> None:
        """Count bytes sent to a client."""
        with self._lock:
            down = self.at(number).bytes_down
            down[client] = down.get(client, 0) + size

    def sent_down(self, number: int) -> int:
        """Return the bytes that a round has sent to all clients."""
        with self._lock:
            return sum(self.at(number).bytes_down.values())

    def note(self, record: r.Record) -> None:
        """Note a record, once or again."""
        with self._lock:
            if getattr(record, "round", None) not in self._settled:
                self._note(record)

    def _note(self, record: r.Record) -> None:
        match record:
            case r.UpdateAccepted():
                here = self.at(record.round)
                here.samples[record.client], here.tokens[record.client] = record.samples, record.tokens
                here.steps[record.client], here.norms[record.client] = record.steps, record.norm
                here.train[record.client], here.bytes_up[record.client] = dict(record.metrics), record.bytes
                here.seconds_by_client[record.client] = record.seconds
            case r.UpdateRefused():
                told = {"client": record.client, "reason": record.reason, "message": record.message}
                if told not in (refused := self.at(record.round).refused):
                    refused.append(told)
            case r.ClientFailed():
                here = self.at(record.round)
                here.failed[record.client] = record.message
                for name in _OF_UPDATES:  # one that was accepted does not count any more
                    getattr(here, name).pop(record.client, None)
            case r.RoundDiscarded():
                here = self._rounds[record.round] = self._anew(self.at(record.round))
                if record.why not in here.discarded:
                    here.discarded.append(record.why)
            case r.RoundSkipped():
                self._rounds[record.round] = self._anew(self.at(record.round))
                self.at(record.round).skipped = record.why
            case r.RoundClosed():
                self.at(record.round).contributors = list(record.clients)
            case r.RoundCommitted():
                here = self.at(record.round)
                here.base, here.norm, here.drift = record.base, record.norm, dict(record.drift)
                if record.clock is not None:
                    here.clock = record.clock
            case r.RoundOpened():
                here = self.at(record.round)
                here.clock, here.skipped = record.clock + record.steps, ""
            case StateSaved():
                for here in map(_round, record.told):
                    if here.round not in self._settled:
                        self._rounds.setdefault(here.round, here)
            case r.RoundEvaluated(client=None):
                self.at(record.round).metrics = dict(record.metrics)
            case r.RoundEvaluated():
                self.at(record.round).metrics_by_client[str(record.client)] = dict(record.metrics)
            case _:
                pass

    @staticmethod
    def _anew(here: Round) -> Round:
        """Return what is kept of a round that is asked for again."""
        kept = {
            name: getattr(here, name) for name in ("round", "clock", "bytes_down", "refused", "failed", "discarded")
        }
        return Round(**kept)

    def take_up(self, settled: int, newest: int, needed: Sequence[int] = ()) -> None:
        """Continue an earlier process's files, before the journal is replayed.

        settled: of rounds below this nothing more will be told. newest: files may not say more than the journal. needed: rounds below
        ``settled`` that the journal tells of, in case the files do not.
        """
        with self._lock:
            self._settled, later = self._file.take_up(settled, needed)
            if not self._settled and not later and min(needed, default=0) > 0:
                log.warning("the history is gone: nothing tells of rounds before %d any more", min(needed))
            self._rounds = {one["round"]: _round(one) for one in later if one["round"] <= newest}

    def begin_with(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint keeps: rounds that nothing else tells of, else what the journal lacks.

        The journal has been gone through.
        """
        with self._lock:
            for entry in told:
                number = entry["round"]
                here = self._rounds.get(number)
                if here is None and number not in self._settled:
                    self._rounds[number] = _round(entry)
                for name in _SEEN_HERE if here is not None else ():
                    setattr(here, name, getattr(here, name) or entry.get(name) or getattr(here, name))
            self._settled = frozenset()

    def kept(self, settled: int) -> list[dict[str, Any]]:
        """Write durably, and return the rounds that may still change."""
        with self._lock:
            self.write(settled, durable=True)
            return [asdict(here) for here in self._in_memory()]

    def write(self, settled: int, *, durable: bool = False) -> None:
        """Keep the history of a run: ``history.jsonl``, a line each round, oldest first, and ``metrics.csv``.

        durable: whether a power failure may not undo what ``history.jsonl`` says then.
        """
        with self._lock:
            done = [here for here in self._in_memory() if here.round < settled]
            later = [here for here in self._in_memory() if here.round >= settled]
            self._table.write([_row(here) for here in done], [_row(here) for here in later])
            try:
                self._file.write([asdict(here) for here in done], [asdict(here) for here in later], durable=durable)
            except OSError:
                self._table.forget()  # it has rows of rounds that the file does not have
                raise
            for here in done:
                del self._rounds[here.round]
            self._over = max(self._over, settled)

    def _in_memory(self) -> list[Round]:
        return [self._rounds[number] for number in sorted(self._rounds)]


def _round(told: Mapping[str, Any]) -> Round:
    """Return a round from its table, also from one of another version."""
    return Round(**{key: value for key, value in told.items() if key in _KNOWN})


_KNOWN = frozenset(one.name for one in fields(Round))


def _row(here: Round) -> dict[str, Any]:
    """Return a round as a row of metrics.csv; a metric named like one of the run's own columns is renamed."""
    own: dict[str, Any] = {
        "round": here.round,
        "step": here.clock,
        "clients": len(here.contributors),
        "train/loss": here.train_loss,
        "norm": here.norm,
        "epsilon": here.epsilon,
        "agreement": math.fsum(here.drift.values()) / len(here.drift) if here.drift else None,
        "bytes_up": sum(here.bytes_up.values()),
        "bytes_down": sum(here.bytes_down.values()),
        **{f"seconds/{phase}": seconds for phase, seconds in here.seconds.items()},
    }
    metrics = {f"metrics/{name}" if name in own else name: value for name, value in here.metrics.items()}
    return {name: value for name, value in (own | metrics).items() if value is not None}


def add_contributions(before: Mapping[str, Any], number: int, updates: Sequence[r.UpdateAccepted]) -> dict[str, Any]:
    """Return each client's contribution so far, with one more round."""
    found = {client: dict(sums) for client, sums in before.items()}
    for update in updates:
        sums = found.setdefault(update.client, {"rounds": 0, "steps": 0, "samples": 0, "tokens": 0, "last": 0})
        sums["rounds"] += 1
        sums["last"] = number
        for name in ("steps", "samples", "tokens"):
            sums[name] += getattr(update, name)
    return found
