"""Hold a run's durable state, a function of the settings and the journal's records.

`coordinator` applies records through the `RecordApplier`; rules, `runtime` and ``arclight federate`` read the state. It is saved in ``run.db``,
and a restart replays the journal of an older version: a new field needs a default, no field is renamed, and applying a record must stay
deterministic.
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace

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
    """A round that is not committed yet, or that clients have started and not finished."""

    round: int
    base: str = ""
    clock: int = 0
    steps: int = 0
    fragment: int | None = None
    wanted: int = 0
    least: int = 0
    """See `RoundOpened.least`."""
    attempt: int = 0
    discarded: int = 0
    """Times that its updates were discarded."""
    failed_aggregations: int = 0
    """The same since the run was last resumed after a failure; limited by ``waiting.retries``."""
    drawn: tuple[str, ...] = ()
    accepted: dict[str, UpdateAccepted] = field(default_factory=dict)
    failed: dict[str, ClientFailed] = field(default_factory=dict)
    redo: dict[str, None] = field(default_factory=dict)
    """Clients that must train again if they are asked again: their finished update is of no use."""
    closed: tuple[str, ...] | None = None
    """Contributors in the order of aggregation; empty if the round is skipped."""


@dataclass
class RoundEvaluation:
    """The evaluation of committed weights, while it is under way."""

    base: str
    waiting: dict[str, None]
    """Clients that have not reported; empty if the server evaluates."""
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Metric to its sum over samples."""
    sum_samples: dict[str, int] = field(default_factory=dict)
    """Metric to the samples in its sum: a client leaves out what is NaN at its site."""

    @property
    def mean(self) -> dict[str, float]:
        over = {name: self.sum_samples.get(name, self.samples) for name in self.sums}
        return {name: value / over[name] for name, value in self.sums.items() if over[name]}


@dataclass
class RunState:
    """Durable state of a run, changed by `RecordApplier` alone.

    Its size grows with the clients of a round, not of the run.
    """

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
    """Digests of recent rounds' weights, which later rounds start from."""
    open: dict[int, RoundState] = field(default_factory=dict)
    """Rounds that are not committed, oldest first."""
    assigned: dict[int, dict[str, None]] = field(default_factory=dict)
    """Round to the clients that were asked to fit it and have neither delivered nor failed."""
    started_rounds: dict[int, RoundState] = field(default_factory=dict)
    """Rounds that assigned clients start from; committed ones among them if updates may be stale."""
    recently_aggregated: dict[str, dict[int, str]] = field(default_factory=dict)
    """Client to round and digest of its newest aggregated updates, for as long as they may be sent again."""
    measuring: dict[int, RoundEvaluation] = field(default_factory=dict)
    """Committed rounds whose evaluation is under way."""
    recent: list[tuple[float, float, float]] = field(default_factory=list)
    """Norm, samples per step and tokens per step of the newest accepted updates: the baseline of validation."""
    ended: str | None = None
    failed: bool = False

    @property
    def oldest(self) -> int:
        """Return the oldest round to which more may happen."""
        return min((self.committed, *self.open, *self.started_rounds, *self.assigned, *self.measuring))


@dataclass(frozen=True, kw_only=True)
class StateSaved(Record):
    """The state that all earlier records lead to: a journal may begin with it."""

    state: RunState


_REMEMBERED = 16
"""Rounds for which a returning client still learns that its update was aggregated. Told that it came too late, it would add that
update's change to its error feedback, and so send it twice."""
_COMPARED = 200
"""Accepted updates with which a new one is compared."""


class RecordApplier:
    """Apply journal records to a `RunState`, by the settings of one run."""

    def __init__(self, settings: Federation, sampler: Sampler, run: str, digest: str) -> None:
        self.settings, self.sampler, self.run, self.digest = settings, sampler, run, digest
        self.state = RunState()

    def quorum(self, wanted: int) -> int:
        """Return the quorum of a round for ``wanted`` clients, at least what can be aggregated.

        It follows today's settings, which a resumed run may have changed.
        """
        return max(self.settings.waiting.need(wanted), self.settings.least_folded)

    def need(self, open: RoundState) -> int:
        """Return the updates with which a round may close.

        They are at least as many as its clients divided their noise by.
        """
        return max(self.quorum(open.wanted), open.least)

    def apply(self, record: Record) -> None:
        match record:
            case RunOpened():
                self._run(record)
            case StateSaved():
                self._copy_from(record.state)
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
                open.failed_aggregations += 1
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
        """Round that collects updates in buffered mode, whichever round they started from."""
        return next((open for open in self.state.open.values() if open.closed is None), None)

    def collecting(self, started: int) -> RoundState | None:
        """Return the round that takes an update started in round ``started``; None if closed."""
        if self.settings.buffered:
            return self.gathering
        open = self.state.open.get(started)
        return open if open is not None and open.closed is None else None

    def accepted(self, client: str, started: int) -> str | None:
        """Return the digest of the update that was accepted from a client for a round."""
        for open in self.state.open.values():
            update = open.accepted.get(client)
            if update is not None and update.round - update.staleness == started:
                return update.digest
        return self.state.recently_aggregated.get(client, {}).get(started)

    def _copy_from(self, state: RunState) -> None:
        """Copy a saved state into this one, which others hold references to."""
        self._check(state.run, state.settings)
        for item in fields(RunState):
            setattr(self.state, item.name, deepcopy(getattr(state, item.name)))  # the record stays what it was
        own = self.state
        own.started_rounds.update({round: open for round, open in own.open.items() if round in own.started_rounds})

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
            open.attempt, open.failed_aggregations = -1, 0  # a resumed run has all its attempts again
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
        state.started_rounds[record.round] = open
        fresh = [client for client in record.clients if client not in open.accepted]
        if self.settings.buffered:  # those that were asked in an earlier round and had not started do this one
            again = set(fresh)
            for clients in state.assigned.values():
                for client in again & clients.keys():
                    del clients[client]
        state.assigned[record.round] = dict.fromkeys(fresh)
        self._forget()

    def _accepted(self, record: UpdateAccepted) -> None:
        open = self.state.open[record.round]
        open.accepted[record.client] = record
        started = record.round - record.staleness
        self.state.assigned.get(started, {}).pop(record.client, None)
        open.failed.pop(record.client, None)
        open.redo.pop(record.client, None)
        self.state.recent.append(_comparison(record))
        del self.state.recent[:-_COMPARED]

    def _failed(self, record: ClientFailed) -> None:
        """Exclude a client from its round, with its update if that was accepted already."""
        self.state.assigned.get(record.round, {}).pop(record.client, None)
        current = self.gathering if self.settings.buffered else self.state.open.get(record.round)
        if current is None:
            return
        current.failed[record.client] = record
        if record.redo:
            current.redo[record.client] = None
        if (update := current.accepted.pop(record.client, None)) is not None:
            with suppress(ValueError):
                self.state.recent.remove(_comparison(update))

    def _lost(self, record: UpdatesLost) -> None:
        """Reopen a round whose updates were lost; in buffered mode only if it has no others."""
        open = self.state.open[record.round]
        for client in record.clients:
            del open.accepted[client]
        if self.settings.buffered:
            open.closed = tuple(client for client in open.closed or () if client in open.accepted) or None
        else:
            open.closed = None
            self.state.assigned.setdefault(record.round, {}).update(dict.fromkeys(record.clients))

    def _closed(self, record: RoundClosed) -> None:
        self.state.open[record.round].closed = record.clients
        if self.settings.buffered:
            self.state.open.setdefault(record.round + 1, RoundState(record.round + 1))
        else:
            self.state.assigned.pop(record.round, None)

    def _committed(self, record: RoundCommitted) -> None:
        state = self.state
        done = state.open.pop(record.round, None)
        if done is not None:
            state.clock = done.clock + done.steps
            for client in done.closed or ():
                update = done.accepted[client]
                folded = state.recently_aggregated.setdefault(client, {})
                folded[update.round - update.staleness] = update.digest
                for old in sorted(folded)[: -1 - self.settings.overlap]:
                    del folded[old]
            if (
                record.round in state.started_rounds
            ):  # for stragglers, which only need the weights that they started from
                state.started_rounds[record.round] = replace(done, drawn=(), accepted={}, failed={}, closed=None)
        state.clock = state.clock if record.clock is None else record.clock
        state.committed, state.base, state.checkpoint = record.round, record.base, record.checkpoint
        state.opened = max(state.opened, record.round)
        state.bases[record.round] = record.base
        for old in [round for round in state.bases if round < record.round - self.settings.overlap]:
            del state.bases[old]
        stale = self.settings.buffered.max_staleness if self.settings.buffered else 1 + self.settings.overlap
        horizon = record.round - max(stale, _REMEMBERED)
        for client in [client for client, rounds in state.recently_aggregated.items() if max(rounds) < horizon]:
            del state.recently_aggregated[client]
        if self.settings.buffered:
            for old in [r for r in state.assigned if record.round + 1 - r > self.settings.buffered.max_staleness]:
                del state.assigned[old]
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
            for name, value in record.metrics.items():
                former = measuring.samples if name in measuring.sums else 0  # of a state that does not say it
                measuring.sum_samples[name] = measuring.sum_samples.get(name, former) + record.samples
                measuring.sums[name] = measuring.sums.get(name, 0.0) + record.samples * value
            measuring.samples += record.samples

    def _forget(self) -> None:
        """Drop rounds that no client works on any more."""
        state = self.state
        for old in [round for round, clients in state.assigned.items() if not clients and round not in state.open]:
            del state.assigned[old]
        for old in [round for round in state.started_rounds if round not in state.assigned and round not in state.open]:
            del state.started_rounds[old]


def _comparison(update: UpdateAccepted) -> tuple[float, float, float]:
    """Return the norm, samples per step and tokens per step of an update."""
    steps = max(update.steps, 1)
    return update.norm, update.samples / steps, update.tokens / steps
