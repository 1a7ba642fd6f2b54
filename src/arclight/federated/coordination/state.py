"""What a run is at some point of its journal, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arclight.federated.coordination.records import ClientFailed, Record, UpdateAccepted


@dataclass
class Open:
    """A round that is not committed yet."""

    round: int
    base: str = ""
    clock: int = 0
    steps: int = 0
    fragment: int | None = None
    wanted: int = 0
    least: int = 0
    """As `RoundOpened.least`."""
    attempt: int = 0
    discarded: int = 0
    """Times that its updates were of no use."""
    folds_failed: int = 0
    """The same, since the run was last taken up after a failure: what counts against ``waiting.retries``."""
    drawn: tuple[str, ...] = ()
    accepted: dict[str, UpdateAccepted] = field(default_factory=dict)
    failed: dict[str, ClientFailed] = field(default_factory=dict)
    redo: dict[str, None] = field(default_factory=dict)
    """Clients that are to train again if they are asked again: what they have finished is of no use."""
    closed: tuple[str, ...] | None = None
    """Contributors, in the order of the fold; none at all where the round is skipped."""


@dataclass
class Measuring:
    """Committed weights whose evaluation is under way."""

    base: str
    waiting: dict[str, None]
    """Clients that have not answered; empty where the server measures."""
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Metric to its sum over samples."""

    @property
    def mean(self) -> dict[str, float]:
        return {name: value / self.samples for name, value in self.sums.items()} if self.samples else {}


@dataclass
class Lasting:
    """The state that a journal gives. To be read; only `Replay` changes it. Its size goes with the clients of a round."""

    run: str = ""
    settings: str = ""
    committed: int = -1
    """Newest committed round; -1: there are no weights yet."""
    base: str = ""
    """Digest of its weights' manifest."""
    checkpoint: str = ""
    clock: int = 0
    """Optimizer steps of the run up to its weights."""
    opened: int = -1
    """Newest round that was opened."""
    bases: dict[int, str] = field(default_factory=dict)
    """Weights of recent rounds, from which others begin."""
    open: dict[int, Open] = field(default_factory=dict)
    """Rounds that are not committed, oldest first."""
    outstanding: dict[int, dict[str, None]] = field(default_factory=dict)
    """Round to clients that were asked to fit it and have neither delivered nor failed."""
    begun: dict[int, Open] = field(default_factory=dict)
    """Rounds that outstanding clients have begun, committed ones among them where updates may be stale."""
    folded: dict[str, dict[int, str]] = field(default_factory=dict)
    """Client to the rounds that it began and the digests of its newest committed updates, as long as they may come again."""
    measuring: dict[int, Measuring] = field(default_factory=dict)
    recent: list[tuple[float, float, float]] = field(default_factory=list)
    """Norm, samples per step and tokens per step of the newest accepted updates, which others are compared with."""
    ended: str | None = None
    failed: bool = False

    @property
    def oldest(self) -> int:
        """The oldest round of which more may happen."""
        return min((self.committed, *self.open, *self.begun, *self.outstanding, *self.measuring))


@dataclass(frozen=True, kw_only=True)
class StateSaved(Record):
    """All that the records before it have led to: a journal may begin with it."""

    state: Lasting
    told: tuple[dict[str, Any], ...] = ()
    """What the history tells of rounds of which more may be told; of older ones its file tells."""
