"""What a run is at some point of its journal, as values."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundCommitted,
    RoundDiscarded,
    RoundEvaluated,
    RoundOpened,
    RoundSkipped,
    RunEnded,
    RunOpened,
    UpdateAccepted,
    UpdatesLost,
)
from arclight.federated.coordination.sampling import Sampler
from arclight.federated.errors import FederatedError
from arclight.federated.settings import Federation


@dataclass
class RoundState:
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
class RoundEvaluation:
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
class RunState:
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
    open: dict[int, RoundState] = field(default_factory=dict)
    """Rounds that are not committed, oldest first."""
    outstanding: dict[int, dict[str, None]] = field(default_factory=dict)
    """Round to clients that were asked to fit it and have neither delivered nor failed."""
    begun: dict[int, RoundState] = field(default_factory=dict)
    """Rounds that outstanding clients have begun, committed ones among them where updates may be stale."""
    folded: dict[str, dict[int, str]] = field(default_factory=dict)
    """Client to the rounds that it began and the digests of its newest committed updates, as long as they may come again."""
    measuring: dict[int, RoundEvaluation] = field(default_factory=dict)
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

    state: RunState
    told: tuple[dict[str, Any], ...] = ()
    """What the history tells of rounds of which more may be told; of older ones its file tells."""


_REMEMBERED = 16
"""Rounds for which a client that has not heard that its update counts, and has been away, is told so: were it told that it came too
late, it would say once more what that update had said."""
_COMPARED = 200
"""Accepted updates with which a new one is compared."""


class RecordApplier:
    """Records into state, by the rules of one run's settings."""

    def __init__(self, settings: Federation, sampler: Sampler, run: str, digest: str) -> None:
        self.settings, self.sampler, self.run, self.digest = settings, sampler, run, digest
        self.state = RunState()

    def quorum(self, wanted: int) -> int:
        """Count the updates with which a round for ``wanted`` may close by the settings of today: never fewer than can be folded."""
        return max(self.settings.waiting.need(wanted), self.settings.least_folded)

    def need(self, open: RoundState) -> int:
        """Count the updates with which a round may close: never fewer than its clients divided its noise by."""
        return max(self.quorum(open.wanted), open.least)

    def apply(self, record: Record) -> None:
        match record:
            case RunOpened():
                self._run(record)
            case StateSaved():
                self._become(record.state)
            case RoundOpened():
                self._opened(record)
            case UpdateAccepted():
                self._accepted(record)
            case UpdatesLost():
                self._lost(record)
            case ClientFailed():
                self._failed(record)
            case RoundClosed():
                self._closed(record)
            case RoundDiscarded():
                open = self.state.open[record.round]
                open.accepted, open.failed, open.closed = {}, {}, None
                open.discarded += 1
                open.folds_failed += 1
            case RoundSkipped():
                self.state.open[record.round].accepted = {}
                self._closed(RoundClosed(round=record.round, clients=()))
            case RoundCommitted():
                self._committed(record)
            case RoundEvaluated():
                self._evaluated(record)
            case RunEnded():
                self.state.ended, self.state.failed = record.why, record.failed

    @property
    def gathering(self) -> RoundState | None:
        """The round that updates go into in buffered mode, whichever round they began with."""
        return next((open for open in self.state.open.values() if open.closed is None), None)

    def into(self, begun: int) -> RoundState | None:
        """The round that an update begun in round ``begun`` goes into now; None where that is closed."""
        if self.settings.buffered:
            return self.gathering
        open = self.state.open.get(begun)
        return open if open is not None and open.closed is None else None

    def accepted(self, client: str, begun: int) -> str | None:
        """Digest of the update that was taken from a client for a round."""
        for open in self.state.open.values():
            update = open.accepted.get(client)
            if update is not None and update.round - update.staleness == begun:
                return update.digest
        return self.state.folded.get(client, {}).get(begun)

    def _become(self, state: RunState) -> None:
        """Others hold on to the state: it stays the one that it is."""
        self._check(state.run, state.settings)
        for item in fields(RunState):
            setattr(self.state, item.name, deepcopy(getattr(state, item.name)))  # the record stays what it was
        own = self.state
        own.begun.update({round: open for round, open in own.open.items() if round in own.begun})

    def _check(self, run: str, settings: str) -> None:
        if run != self.run:
            raise FederatedError(f"this journal is of run {run!r}, not of {self.run!r}: give each run a folder")
        if settings != self.digest:
            raise FederatedError(
                f"run {run!r} was begun with other settings or clients, which would change its result: resume with those "
                "(the run folder's recipe), or fork a new run from one of its rounds"
            )

    def _run(self, record: RunOpened) -> None:
        self._check(record.run, record.settings)
        self.state.run, self.state.settings = record.run, record.settings
        self.state.ended, self.state.failed = None, False
        for open in self.state.open.values():
            open.attempt, open.folds_failed = -1, 0  # a run that is taken up again has its attempts again
            open.failed = {client: replace(failed, lost=True) for client, failed in open.failed.items()}

    def _opened(self, record: RoundOpened) -> None:
        state = self.state
        open = state.open.setdefault(record.round, RoundState(record.round))
        if open.drawn:
            open.attempt += 1
            for client in record.clients:
                open.failed.pop(client, None)
        open.base, open.clock, open.steps = record.base, record.clock, record.steps
        open.fragment, open.wanted, open.drawn = record.fragment, record.wanted, record.clients
        open.least = record.least
        state.opened = max(state.opened, record.round)
        state.begun[record.round] = open
        fresh = [client for client in record.clients if client not in open.accepted]
        if self.settings.buffered:  # those that were asked in an earlier round and had not begun do this one
            again = set(fresh)
            for clients in state.outstanding.values():
                for client in again & clients.keys():
                    del clients[client]
        state.outstanding[record.round] = dict.fromkeys(fresh)
        self._forget()

    def _accepted(self, record: UpdateAccepted) -> None:
        open = self.state.open[record.round]
        open.accepted[record.client] = record
        begun = record.round - record.staleness
        self.state.outstanding.get(begun, {}).pop(record.client, None)
        open.failed.pop(record.client, None)
        open.redo.pop(record.client, None)
        self.state.recent.append(_told(record))
        del self.state.recent[:-_COMPARED]

    def _failed(self, record: ClientFailed) -> None:
        """Put a client out of its round, with its update where that was accepted already."""
        self.state.outstanding.get(record.round, {}).pop(record.client, None)
        current = self.gathering if self.settings.buffered else self.state.open.get(record.round)
        if current is None:
            return
        current.failed[record.client] = record
        if record.redo:
            current.redo[record.client] = None
        if (update := current.accepted.pop(record.client, None)) is not None:
            with suppress(ValueError):
                self.state.recent.remove(_told(update))

    def _lost(self, record: UpdatesLost) -> None:
        """A round that was closed with them is open again; in buffered mode only where nothing else is in it."""
        open = self.state.open[record.round]
        for client in record.clients:
            del open.accepted[client]
        if self.settings.buffered:
            open.closed = tuple(client for client in open.closed or () if client in open.accepted) or None
        else:
            open.closed = None
            self.state.outstanding.setdefault(record.round, {}).update(dict.fromkeys(record.clients))

    def _closed(self, record: RoundClosed) -> None:
        self.state.open[record.round].closed = record.clients
        if self.settings.buffered:
            self.state.open.setdefault(record.round + 1, RoundState(record.round + 1))
        else:
            self.state.outstanding.pop(record.round, None)

    def _committed(self, record: RoundCommitted) -> None:
        state = self.state
        done = state.open.pop(record.round, None)
        if done is not None:
            state.clock = done.clock + done.steps
            for client in done.closed or ():
                update = done.accepted[client]
                folded = state.folded.setdefault(client, {})
                folded[update.round - update.staleness] = update.digest
                for old in sorted(folded)[: -1 - self.settings.overlap]:
                    del folded[old]
            if record.round in state.begun:  # for stragglers, which only need to know what they began from
                state.begun[record.round] = replace(done, drawn=(), accepted={}, failed={}, closed=None)
        state.clock = state.clock if record.clock is None else record.clock
        state.committed, state.base, state.checkpoint = record.round, record.base, record.checkpoint
        state.opened = max(state.opened, record.round)
        state.bases[record.round] = record.base
        for old in [round for round in state.bases if round < record.round - self.settings.overlap]:
            del state.bases[old]
        stale = self.settings.buffered.most_stale if self.settings.buffered else 1 + self.settings.overlap
        horizon = record.round - max(stale, _REMEMBERED)
        for client in [client for client, rounds in state.folded.items() if max(rounds) < horizon]:
            del state.folded[client]
        if self.settings.buffered:
            for old in [r for r in state.outstanding if record.round + 1 - r > self.settings.buffered.most_stale]:
                del state.outstanding[old]
        self._forget()
        if record.measured:
            drawn = done.drawn if done is not None else self.sampler.draw(record.round)
            waiting = dict.fromkeys(drawn if self.settings.evaluate_on == "clients" else ())
            state.measuring[record.round] = RoundEvaluation(record.base, waiting)

    def _evaluated(self, record: RoundEvaluated) -> None:
        measuring = self.state.measuring.get(record.round)
        if measuring is None:
            return
        if record.client is None:
            del self.state.measuring[record.round]
        elif record.client in measuring.waiting:
            del measuring.waiting[record.client]
            measuring.samples += record.samples
            for name, value in record.metrics.items():
                measuring.sums[name] = measuring.sums.get(name, 0.0) + record.samples * value

    def _forget(self) -> None:
        """Rounds that nobody is at work on any more."""
        state = self.state
        for old in [round for round, clients in state.outstanding.items() if not clients and round not in state.open]:
            del state.outstanding[old]
        for old in [round for round in state.begun if round not in state.outstanding and round not in state.open]:
            del state.begun[old]


def _told(update: UpdateAccepted) -> tuple[float, float, float]:
    """Norm, samples per step and tokens per step of an update."""
    steps = max(update.steps, 1)
    return update.norm, update.samples / steps, update.tokens / steps
