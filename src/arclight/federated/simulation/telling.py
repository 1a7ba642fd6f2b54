"""What a simulation keeps of its rounds, to be told at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arclight.federated.coordination.events import Command, LogMessage, NodeLost
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundCommitted,
    RoundOpened,
    UpdateAccepted,
)
from arclight.federated.simulation.result import RoundTimes, Simulated


@dataclass
class _Round:
    opened: float = 0.0
    closed: float = 0.0
    asked: dict[str, None] = field(default_factory=dict)
    accepted: int = 0
    failed: int = 0
    compute: float = 0.0
    down: int = 0
    up: int = 0
    late: dict[str, None] = field(default_factory=dict)
    late_count: int = 0


class Telling:
    """Counts by round. Names are kept for rounds that are under way."""

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

    def heard(self, command: Command) -> None:
        if isinstance(command, NodeLost):
            self._lost += 1
        elif isinstance(command, LogMessage) and len(self._messages) < 100:
            self._messages.append(command.text)

    def result(self, **known: Any) -> Simulated:
        rounds = tuple(
            RoundTimes(
                round=number, opened=r.opened, closed=r.closed, committed=committed, asked=len(r.asked), accepted=r.accepted,
                failed=r.failed, compute=r.compute, bytes_down=r.down, bytes_up=r.up, late=r.late_count, late_names=tuple(r.late),
            )
            for number, (r, committed) in sorted(self._done.items())
        )  # fmt: skip
        return Simulated(
            rounds=rounds, lost=self._lost, messages=tuple(self._messages),
            bytes_down=sum(r.down for r in self._rounds.values()), bytes_up=sum(r.up for r in self._rounds.values()), **known,
        )  # fmt: skip

    def _at(self, round: int) -> _Round:
        return self._rounds.setdefault(round, _Round())
