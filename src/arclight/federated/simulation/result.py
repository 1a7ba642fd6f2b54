"""Record a simulation and report its result.

`simulator` fills a `SimulationRecorder`, `simulate` returns the `SimulationResult`. Fields are public: add, do not rename.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from arclight.federated.coordination.events import Command, LogMessage, NodeLost
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundCommitted,
    RoundOpened,
    RoundSkipped,
    UpdateAccepted,
)


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """One round. Times are seconds since the run began."""

    round: int
    opened: float
    closed: float
    committed: float
    asked: int
    accepted: int
    failed: int
    compute: float
    """The longest training among the contributors, seconds."""
    bytes_down: int
    bytes_up: int
    late: int
    """Clients whose work was cancelled, or came too late to be used."""
    late_names: tuple[str, ...]
    """The first ten of them."""

    @property
    def seconds(self) -> float:
        return self.committed - self.opened


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of a simulation. ``print(result)`` shows a summary."""

    rounds: tuple[RoundTimes, ...]
    seconds: float
    """Virtual time of the whole run, evaluation included."""
    bytes_down: int
    bytes_up: int
    check_seconds: float
    """Server time for updates that arrived, over all threads."""
    fold_seconds: float
    """Server time for folds, steps and checkpoints."""
    lost: int
    """Nodes that fell silent."""
    events: int
    ended: str
    failed: bool
    model_bytes: int
    update_bytes: int
    weights_bytes: int
    clients: int = 0
    messages: tuple[str, ...] = field(default=())
    """The first hundred log lines of the coordinator."""

    @property
    def round_seconds(self) -> float:
        """Return the median time from one commit to the next; of the first round, from its opening."""
        ends = [self.rounds[0].opened, *(r.committed for r in self.rounds)] if self.rounds else []
        return median(b - a for a, b in pairwise(ends)) if self.rounds else 0.0

    @property
    def busy(self) -> float:
        """Return the share of the run in which the server aggregates, steps and writes checkpoints."""
        return self.fold_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.clients} clients, {len(self.rounds)} rounds in {_time(self.seconds)}: {self.ended}",
            f"a round takes {_time(self.round_seconds)} (median); the server folds {100 * self.busy:.1f} % of the time "
            f"and checks updates for {_time(self.check_seconds)}",
            f"model {_size(self.model_bytes)}, update {_size(self.update_bytes)}; "
            f"in all {_size(self.bytes_down)} down and {_size(self.bytes_up)} up; {self.lost} nodes fell silent",
            f"{'round':>6} {'took':>9} {'training':>9} {'asked':>6} {'taken':>6} {'failed':>6} {'late':>5} {'down':>9} {'up':>9}",
        ]
        shown = self.rounds if len(self.rounds) <= 12 else (*self.rounds[:6], *self.rounds[-6:])
        for r in shown:
            lines.append(
                f"{r.round:>6} {_time(r.seconds):>9} {_time(r.compute):>9} {r.asked:>6} {r.accepted:>6} {r.failed:>6} {r.late:>5} "
                f"{_size(r.bytes_down):>9} {_size(r.bytes_up):>9}"
            )
        return "\n".join(lines)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.3g} {unit}"
        bytes /= 1000
    return f"{bytes:.3g} TB"


@dataclass
class _Round:
    opened: float = 0.0
    closed: float = 0.0
    asked: dict[str, None] = field(default_factory=dict)
    """Clients of the round, until it is committed or skipped."""
    asked_before: int = 0
    """Their number from then on."""
    accepted: int = 0
    failed: int = 0
    compute: float = 0.0
    down: int = 0
    up: int = 0
    late: dict[str, None] = field(default_factory=dict)
    late_count: int = 0

    def forget_names(self) -> None:
        self.asked_before += len(self.asked)
        self.asked.clear()


class SimulationRecorder:
    """Count events by round; the names of its clients are kept until it is committed or skipped."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}
        self._done: dict[int, tuple[_Round, float]] = {}
        self._lost = 0
        self._messages: list[str] = []

    def note(self, record: Record, now: float) -> None:
        match record:
            case RoundOpened():
                round = self._at(record.round)
                round.opened = round.opened or now
                round.asked |= dict.fromkeys(record.clients)
            case UpdateAccepted():
                self._at(record.round).accepted += 1
                self._at(record.round).compute = max(self._at(record.round).compute, record.seconds)
            case ClientFailed():
                self._at(record.round).failed += 1
            case RoundClosed():
                self._at(record.round).closed = now
            case RoundCommitted(round=number) if number > 0:
                self._done[number] = (self._at(number), now)
                self._at(number).forget_names()
            case RoundSkipped():
                self._at(record.round).forget_names()

    def asked(self, round: int) -> tuple[str, ...]:
        return tuple(self._at(round).asked)

    def down(self, round: int, bytes: int) -> None:
        self._at(round).down += bytes

    def up(self, round: int, bytes: int) -> None:
        self._at(round).up += bytes

    def late(self, round: int, client: str) -> None:
        kept = self._at(round)
        kept.late_count += 1
        if len(kept.late) < 10:
            kept.late[client] = None

    def note_command(self, command: Command) -> None:
        if isinstance(command, NodeLost):
            self._lost += 1
        elif isinstance(command, LogMessage) and len(self._messages) < 100:
            self._messages.append(command.text)

    def result(self, **known: Any) -> SimulationResult:
        rounds = tuple(
            RoundTimes(
                round=number, opened=r.opened, closed=r.closed, committed=committed, asked=r.asked_before + len(r.asked), accepted=r.accepted,
                failed=r.failed, compute=r.compute, bytes_down=r.down, bytes_up=r.up, late=r.late_count, late_names=tuple(r.late),
            )
            for number, (r, committed) in sorted(self._done.items())
        )  # fmt: skip
        return SimulationResult(
            rounds=rounds, lost=self._lost, messages=tuple(self._messages),
            bytes_down=sum(r.down for r in self._rounds.values()), bytes_up=sum(r.up for r in self._rounds.values()), **known,
        )  # fmt: skip

    def _at(self, round: int) -> _Round:
        return self._rounds.setdefault(round, _Round())
