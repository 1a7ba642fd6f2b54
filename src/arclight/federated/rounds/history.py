"""Record each round's metrics in the run's database, and export them as ``metrics.csv``.

`server_run` and `service` record it; `Server`, the report (`run_report`) and `tools` read it. Entries are JSON in users' databases and in round
checkpoints: names of fields stay, new ones need a default, unknown ones are ignored.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from arclight.checkpoint.remote import to_path
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.coordination import records as r
from arclight.federated.coordination import run_database
from arclight.federated.coordination.run_database import HISTORY_LINES, RunDatabase, RunDatabaseError
from arclight.federated.coordination.run_state import StateSaved

log = logging.getLogger(__name__)


def read_history(run: str | Path) -> list[dict[str, Any]]:
    """Read the history of the run in a folder, also while it is served.

    Raises FileNotFoundError if it has none.
    """
    return run_database.read_history(to_path(run))


def read_rounds(run: str | Path) -> list[Round]:
    """Read the history of the run in a folder; empty if it has none."""
    try:
        return [_round(entry) for entry in read_history(run)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def copy_history(source: str | Path, target: str | Path, until: int) -> None:
    """Copy the history of rounds up to ``until`` to a new run, as JSON lines.

    Nothing is copied if the source has none, or a damaged one.
    """
    try:
        lines = [json.dumps(asdict(here)) + "\n" for here in read_rounds(source) if here.round <= until]
    except RunDatabaseError as error:
        log.warning("the new run begins without the history of rounds before its own: %s", error)
        return
    copy = to_path(target) / HISTORY_LINES
    if lines:
        if isinstance(copy, Path):
            copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes("".join(lines).encode())


def export_metrics(run: str | Path) -> None:
    """Write ``metrics.csv`` in the run's folder: rows are rounds, columns are metrics."""
    rows = [metrics_row(here) for here in read_rounds(run)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(Path(run) / "metrics.csv", text.getvalue(), durable=False)


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
    """Metrics of the evaluation: the server's, or the clients' weighted by samples."""
    metrics_by_client: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: round (opened to committed), waiting (opened to closed), fold (with the server's step and its checkpoint), evaluate."""
    seconds_by_client: dict[str, float] = field(default_factory=dict)
    """Seconds of training by client, without transfers."""
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
        """Validation loss if measured, else the mean training loss of clients, by samples."""
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
    return mean_by_samples(losses, samples)


def mean_by_samples(values: Mapping[str, float], samples: Mapping[str, int]) -> float | None:
    """Average clients' values, weighed by their samples; None if there are none."""
    weight = sum(samples.get(client, 0) for client in values)
    return math.fsum(v * samples.get(c, 0) for c, v in values.items()) / weight if weight else None


_OF_UPDATES = ("samples", "tokens", "steps", "norms", "train")
"""Fields of a round about the updates that count."""
_SEEN_HERE = ("bytes_down", "seconds", "noise_scale", "epsilon")
"""Fields that no record has: after a restart they come from the round's checkpoint."""


class History:
    """Build the history from records, noted in the journal's order. Thread-safe.

    Rounds that may still change are in memory, others in the run's database alone.
    """

    def __init__(self, database: RunDatabase) -> None:
        self._lock = threading.RLock()
        self._database = database
        self._rounds: dict[int, Round] = {}
        self._over = 0
        """Rounds below this are recorded to their end."""

    @property
    def rounds(self) -> list[Round]:
        """Return all rounds, read from the database."""
        with self._lock:
            stored = (_round(entry) for entry in self._database.history())
            return [*(here for here in stored if here.round < self._over), *self._in_memory()]

    def at(self, number: int) -> Round:
        """Return a round, to be added to. A round that no longer changes is not kept."""
        with self._lock:
            return Round(round=number) if number < self._over else self._rounds.setdefault(number, Round(round=number))

    def to_json(self, number: int) -> dict[str, Any]:
        """Return a round as JSON values."""
        with self._lock:
            return asdict(self.at(number))

    def record_duration(self, number: int, phase: str, seconds: float) -> None:
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
        """Apply a record to the history; repeating it changes nothing."""
        with self._lock:
            if getattr(record, "round", self._over) >= self._over:
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
                entry = {"client": record.client, "reason": record.reason, "message": record.message}
                if entry not in (refused := self.at(record.round).refused):
                    refused.append(entry)
            case r.ClientFailed():
                here = self.at(record.round)
                here.failed[record.client] = record.message
                for name in _OF_UPDATES:  # one that was accepted does not count any more
                    getattr(here, name).pop(record.client, None)
            case r.RoundDiscarded():
                here = self._rounds[record.round] = self._restarted(self.at(record.round))
                if record.why not in here.discarded:
                    here.discarded.append(record.why)
            case r.RoundSkipped():
                self._rounds[record.round] = self._restarted(self.at(record.round))
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
            case r.RoundEvaluated(client=None):
                self.at(record.round).metrics = dict(record.metrics)
            case r.RoundEvaluated():
                self.at(record.round).metrics_by_client[str(record.client)] = dict(record.metrics)
            case _:
                pass

    @staticmethod
    def _restarted(here: Round) -> Round:
        """Return the fields of a round that are kept when it is requested again."""
        kept = {
            name: getattr(here, name) for name in ("round", "clock", "bytes_down", "refused", "failed", "discarded")
        }
        return Round(**kept)

    def load(self, settled: int, newest: int) -> None:
        """Continue an earlier process's history, before its records are noted again.

        settled: rounds below this no longer change. newest: no row may say more than the journal.
        """
        with self._lock:
            last = self._database.last_settled()
            self._over = min(settled, last + 1)
            if last < 0 < settled <= newest:
                log.warning("the history is gone: nothing tells of rounds before %d any more", settled)
            stored = map(_round, self._database.history(self._over))
            self._rounds = {here.round: here for here in stored if here.round <= newest}

    def add_missing(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Add rounds of a checkpoint that no record has, and fields that records lack."""
        with self._lock:
            for entry in entries:
                here = self._rounds.get(entry["round"])
                if here is None and entry["round"] >= self._over:
                    self._rounds[entry["round"]] = _round(entry)
                for name in _SEEN_HERE if here is not None else ():
                    setattr(here, name, getattr(here, name) or entry.get(name) or getattr(here, name))

    def write(self, settled: int, state: StateSaved | None = None) -> None:
        """Write all rounds, and drop those below ``settled`` from memory.

        state: it replaces the journal's records in the same commit. Raises RunDatabaseError, and nothing is changed.
        """
        with self._lock:
            rows = [(here.round >= settled, asdict(here)) for here in self._in_memory()]
            self._database.write_history(self._over, rows, state)
            self._over = max(self._over, settled)
            self._rounds = {number: here for number, here in self._rounds.items() if number >= self._over}

    def _in_memory(self) -> list[Round]:
        return [self._rounds[number] for number in sorted(self._rounds)]


def _round(entry: Mapping[str, Any]) -> Round:
    """Return a round from its table, also from one of another version."""
    return Round(**{key: value for key, value in entry.items() if key in _KNOWN})


_KNOWN = frozenset(one.name for one in fields(Round))


def metrics_row(here: Round) -> dict[str, Any]:
    """Return a round as a row of metrics.csv.

    A metric named like one of the run's own columns is renamed.
    """
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
