"""What became of each round, as the journal tells it, with what only this process has seen (bytes sent, seconds of phases)."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from arclight.federated.coordination import records as r
from arclight.federated.durable import replace_durably


@dataclass(kw_only=True)
class Round:
    """One round. Bytes and seconds by client or phase."""

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

    @property
    def loss(self) -> float | None:
        """Validation loss where it was measured, else the mean of the clients' training losses, weighed by samples."""
        return _loss(self.metrics, self.train, self.samples)

    @property
    def train_loss(self) -> float | None:
        return _loss({}, self.train, self.samples)


def loss_of(entry: Mapping[str, Any]) -> float | None:
    """`Round.loss` of a round as a checkpoint keeps it."""
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


_SEEN_HERE = ("bytes_down", "seconds", "noise_scale", "epsilon")


class History:
    """Rounds as records come in; `note` in the journal's order."""

    def __init__(self) -> None:
        self._rounds: dict[int, Round] = {}

    @property
    def rounds(self) -> list[Round]:
        return [self._rounds[number] for number in sorted(self._rounds)]

    def at(self, number: int) -> Round:
        return self._rounds.setdefault(number, Round(round=number))

    def note(self, record: r.Record) -> None:
        """Take in what the journal says."""
        match record:
            case r.UpdateAccepted():
                here = self.at(record.round)
                here.samples[record.client], here.tokens[record.client] = record.samples, record.tokens
                here.steps[record.client], here.norms[record.client] = record.steps, record.norm
                here.train[record.client], here.bytes_up[record.client] = dict(record.metrics), record.bytes
                here.seconds_by_client[record.client] = record.seconds
            case r.UpdateRefused():
                told = {"client": record.client, "reason": record.reason, "message": record.message}
                self.at(record.round).refused.append(told)
            case r.ClientFailed():
                self.at(record.round).failed[record.client] = record.message
            case r.RoundClosed():
                self.at(record.round).contributors = list(record.clients)
            case r.RoundCommitted():
                here = self.at(record.round)
                here.base, here.norm, here.drift = record.base, record.norm, dict(record.drift)
                before = self._rounds.get(record.round - 1)
                if record.clock is not None:
                    here.clock = record.clock
                elif not here.clock and before is not None:
                    here.clock = before.clock
            case r.RoundOpened():
                here = self.at(record.round)
                here.clock = record.clock + record.steps
            case r.RoundEvaluated(client=None):
                self.at(record.round).metrics = dict(record.metrics)
            case r.RoundEvaluated():
                self.at(record.round).metrics_by_client[str(record.client)] = dict(record.metrics)
            case _:
                pass

    def to_list(self, until: int | None = None) -> list[dict[str, Any]]:
        """As JSON values, of the rounds up to ``until``."""
        return [asdict(here) for here in self.rounds if until is None or here.round <= until]

    def begin_with(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint has kept: all of rounds that the journal does not know, else what it cannot know."""
        known = {one.name for one in fields(Round)}
        for entry in told:
            number = entry["round"]
            if number not in self._rounds:
                self._rounds[number] = Round(**{key: value for key, value in entry.items() if key in known})
            else:
                for name in _SEEN_HERE:
                    setattr(self._rounds[number], name, entry.get(name, getattr(self._rounds[number], name)))

    def write(self, folder: Path) -> None:
        """``history.json`` and ``metrics.csv``, each replaced in one step; the journal and the checkpoints have all of it."""
        replace_durably(folder / "history.json", json.dumps(self.to_list(), indent=1, allow_nan=False), synced=False)
        rows = [_row(here) for here in self.rounds]
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        replace_durably(folder / "metrics.csv", text.getvalue(), synced=False)


def _row(here: Round) -> dict[str, Any]:
    """A round as a line of metrics.csv."""
    row: dict[str, Any] = {
        "round": here.round,
        "step": here.clock,
        "clients": len(here.contributors),
        "train/loss": here.train_loss,
        **here.metrics,
        "norm": here.norm,
        "epsilon": here.epsilon,
        "drift": math.fsum(here.drift.values()) / len(here.drift) if here.drift else None,
        "bytes_up": sum(here.bytes_up.values()),
        "bytes_down": sum(here.bytes_down.values()),
        **{f"seconds/{phase}": seconds for phase, seconds in here.seconds.items()},
    }
    return {name: value for name, value in row.items() if value is not None}
