"""Run rounds as a state machine without I/O or clock: decide, then apply.

``server.runtime`` drives it in real runs, ``simulation.simulator`` in simulated ones, by the contract in `events`. `message_rules` and
`round_rules` decide, `run_state` is the journaled state, `cluster` the state that is not journaled (sessions, assignments, timers).
A decision must depend on state, event and time alone, so that simulated and killed runs repeat. `replay` applies a journal's records and decides
nothing; `settings_digest` must stay equal for the settings of old runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from arclight.federated.coordination import answers, message_rules, round_rules
from arclight.federated.coordination.cluster import Assignment, ClusterState, NodeState
from arclight.federated.coordination.events import (
    Answer,
    Command,
    Decision,
    Event,
    NodeMessage,
    RunResumed,
    RunStarted,
    Tick,
)
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
    UpdateAccepted,
)
from arclight.federated.coordination.run_state import RecordApplier, RoundState, RunState, StateSaved
from arclight.federated.coordination.sampling import Roster, Sampler
from arclight.federated.coordination.situation import Situation
from arclight.federated.errors import FederatedError, Reason
from arclight.federated.protocol import Update
from arclight.federated.settings import Federation

_FREE = {
    "rounds",
    "waiting",
    "checkpoint_every_steps",
    "evaluate_every",
    "evaluate_on",
    "keep_rounds",
    "down_changes",
    "blobs_at",
}
"""Settings that may change when a run is resumed."""
_ALWAYS_DIGESTED = {
    "FedAvg": "lr",
    "FedMomentum": "lr momentum",
    "FedNesterov": "lr momentum",
    "FedAdam": "lr betas tau bias_correction",
    "FedYogi": "lr betas tau bias_correction",
    "DiLoCo": "lr momentum",
    "SparseLoCo": "lr",
    "Median": "",
    "Trimmed": "share",
    "Krum": "byzantine keep",
    "NormBound": "largest times",
    "Noise": "clip multiplier delta epsilon by",
    "SecureSum": "threshold partners largest step_timeout_s max_weight",
    "Masks": "send leave_out frozen personal personal_from randomised randomise_every periods experts head_experts",
    "Experts": "tensors per_client assign overlap every",
    "HeadExperts": "tensors per_client assign overlap every heads",
    "Raw": "",
    "BF16": "feedback",
    "Int8": "feedback block",
    "Int4": "feedback block",
    "TopK": "feedback share bits block",
    "Sampling": "per_round over_provision dropout hours",
    "Hours": "per_round length outside",
    "Buffered": "size max_staleness",
    "Streaming": "fragments overlap mix",
    "Checks": "norm_times weight_times bytes_times",
}
"""Class to the fields of nested settings that are in digests also at their default, as in those of the first release.

A new class gets a row; a new field of a class gets none, so that digests of runs without it stay.
"""


def settings_digest(settings: Federation, roster: Roster, seed: int) -> str:
    """Return the SHA-256 of all settings that decide a run's result.

    Fields at their default do not count, so that fields can be added; those in `_ALWAYS_DIGESTED` always count.
    """
    parts = [f"{len(roster)} clients of {roster.name(0)} to {roster.name(len(roster) - 1)}, seed {seed}"]
    usual = Federation(clients=settings.clients)
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name not in _FREE and item.name != "clients" and value != getattr(usual, item.name):
            parts.append(f"{item.name}={_text(value)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text(value: Any) -> str:
    """Return ``repr(value)`` as older releases gave it.

    It has former names, and no fields of today that are at their default.
    """
    kind = type(value)
    if kind.__qualname__ not in _ALWAYS_DIGESTED:  # a plain value, or a user's own class
        return repr(value)
    counted = {*_ALWAYS_DIGESTED[kind.__qualname__].split()}
    counted |= {item.name for item in fields(value) if getattr(value, item.name) != _default(item)}
    former = {today: name for name, today in getattr(kind, "_former_names", {}).items()}
    shown = (item.name for item in fields(value) if item.name in counted)
    return f"{kind.__qualname__}({', '.join(f'{former.get(one, one)}={_text(getattr(value, one))}' for one in shown)})"


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


class Coordinator:
    """State machine of a run: decide what follows from events, and apply decisions.

    See `arclight.federated.coordination.events` for how it is driven.
    clients: their names, or how many ("0", "1", ...). seed: of draws. run: name of the run, which nodes and journal repeat.
    """

    def __init__(self, settings: Federation, clients: Sequence[str] | int, seed: int, run: str) -> None:
        roster = Roster(clients)
        sampler = Sampler(settings.sampling, roster, seed)
        records = RecordApplier(settings, sampler, run, settings_digest(settings, roster, seed))
        cluster = ClusterState(settings.waiting, records.state, settings.overlap)
        self._situation = Situation(settings, run, roster, sampler, records, cluster)
        self.settings, self.run, self.roster, self.sampler = settings, run, roster, sampler

    @property
    def state(self) -> RunState:
        """The durable state, as the journal gives it. Read only."""
        return self._situation.state

    @property
    def cluster(self) -> ClusterState:
        """Nodes and assignments at this moment. Read only."""
        return self._situation.cluster

    def need(self, open: RoundState) -> int:
        """Return the updates with which a round may close."""
        return self._situation.records.need(open)

    def accepted(self, client: str, round: int) -> str | None:
        """Return the digest of the update that was accepted from a client for a round."""
        return self._situation.records.accepted(client, round)

    def bases(self) -> frozenset[str]:
        """Return digests of weights that clients may start from or evaluate, or the run return to."""
        state = self.state
        found = {*state.bases.values(), *(open.base for open in state.started_rounds.values())}
        found |= {measuring.base for measuring in state.measuring.values()}
        return frozenset(found - {""})

    def next_deadline(self) -> float | None:
        """Return the time of the next `Tick`; minus infinity: now; None: never.

        Never before a run has begun, and after its end once no request is held.
        """
        return float("-inf") if round_rules.is_urgent(self._situation) else self.next_alarm()

    def next_alarm(self) -> float | None:
        """Return the time of the next timer; None before a run has begun and after its end."""
        timers = self.cluster.timers
        return timers[0].at if timers and self.state.ended is None else None

    def status(self, now: float) -> str:
        """Describe the clients and nodes the run waits for, for logs."""
        return answers.status(self._situation, now)

    # -- decide ------------------------------------------------------------------------------------------------------------

    def decide(self, event: Event, now: float) -> Decision:
        """Decide what follows from an event, changing nothing.

        Raises FederatedError, mostly ProtocolError, for an event that is not allowed now.
        """
        return message_rules.decide(self._situation, event, now)

    def refusal(self, session: str, update: Update, digest: str) -> tuple[Reason, str] | None:
        """Return the reason to refuse an update; None if it would be, or is, accepted.

        digest: of its manifest; the same update that is sent again is accepted again.
        """
        return message_rules.refusal(self._situation, session, update, digest)

    def lost(self, round: int, clients: Sequence[str]) -> tuple[Record, ...]:
        """Return the records to journal before `RunResumed` if accepted updates are lost.

        ``clients``: whose updates of the round those are.
        """
        return message_rules.lost(self._situation, round, clients)

    def saved(self) -> StateSaved:
        """Return the record that replaces all records so far.

        It holds the state itself: write it before anything else happens.
        """
        return StateSaved(state=self.state)

    # -- apply -------------------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record]) -> None:
        """Replay records to restore the durable state.

        Raises FederatedError if the records are of another run or other settings.
        """
        for record in records:
            self._situation.records.apply(record)

    def apply(self, decision: Decision) -> None:
        """Make a decision true, once its records are on disk."""
        cluster, now = self.cluster, decision.now
        if isinstance(decision.event, RunStarted | RunResumed):
            self._start_timers(now, resumed=isinstance(decision.event, RunResumed))
        for change in decision.before:
            change()
        session = decision.event.session if isinstance(decision.event, NodeMessage) else ""
        node = cluster.sessions.get(session)
        for record in decision.records:
            self._situation.records.apply(record)
            self._on_record(record, node, now)
        for change in decision.changes:
            change()
        for command in decision.commands:
            if isinstance(command, Answer):
                cluster.release_request(command.to)
        if any(isinstance(r, RoundClosed | RoundSkipped | RoundCommitted | RunEnded) for r in decision.records):
            cluster.prune(now)

    def _start_timers(self, now: float, *, resumed: bool) -> None:
        cluster, state = self.cluster, self.state
        if resumed:
            cluster.begin_rejoin(now, started=state.opened > state.committed or state.committed > 0)
        cluster.mark_empty(now)
        cluster.arm(now + round_rules.STATUS_INTERVAL_S, "say")
        if resumed:
            for open in state.open.values():
                self._on_opened(open.round, now)
            for round in state.measuring:
                self._assign_evaluation(round, now)

    def _on_record(self, record: Record, node: NodeState | None, now: float) -> None:
        """Apply a record to the cluster.

        node: whose message the record is of, if any.
        """
        cluster = self.cluster
        match record:
            case RoundOpened():
                self._on_opened(record.round, now)
            case UpdateAccepted():
                cluster.finish(Assignment("fit", record.round - record.staleness, record.client), node)
                self._start_grace(record.round, now)
            case ClientFailed():
                cluster.finish(Assignment("fit", record.round, record.client), node)
                if record.lost:
                    cluster.mark_unclaimed(record.client)
            case RoundDiscarded():
                cluster.mark_aggregating(None)
                if self.settings.secure is not None:
                    cluster.reassign_started(record.round, now)
            case RoundSkipped():
                cluster.mark_aggregating(None)
            case RoundCommitted():
                cluster.mark_aggregating(None)
                self._assign_evaluation(record.round, now)
            case RoundEvaluated(client=str(client)):
                cluster.finish(Assignment("evaluate", record.round, client), node)
            case RoundEvaluated():
                cluster.prune(now)

    def _on_opened(self, round: int, now: float) -> None:
        cluster, state, waiting = self.cluster, self.state, self.settings.waiting
        if self.settings.buffered:  # work that no node has started is done from the newest weights
            cluster.prune(now)
        open = state.open[round]
        if waiting.deadline_s is not None and open.closed is None:
            cluster.set_deadline(round, open.attempt, now + waiting.deadline_s)
        for started, clients in state.assigned.items():
            cluster.add((Assignment("fit", started, client) for client in clients), now)
        self._start_grace(round, now)

    def _start_grace(self, round: int, now: float) -> None:
        """Start the grace once there is a quorum."""
        open, grace = self.state.open[round], self.settings.waiting.grace_s
        if grace is None or ("quorum", round, open.attempt) in self.cluster.passed:
            return
        if open.wanted and len(open.accepted) >= self.need(open):
            self.cluster.mark_passed("quorum", round, open.attempt)
            self.cluster.arm(now + grace, "grace", (round, open.attempt))

    def _assign_evaluation(self, round: int, now: float) -> None:
        if round in self.state.measuring:
            waiting = self.settings.waiting
            self.cluster.add((Assignment("evaluate", round, x) for x in self.state.measuring[round].waiting), now)
            self.cluster.arm(now + (waiting.deadline_s or waiting.join_timeout_s), "measure", round)


_MAX_STEPS = 1_000_000


class BrokenError(FederatedError):
    """Error of a decision that was journaled but not applied; the coordinator is unusable."""


def run_to_quiescence(
    coordinator: Coordinator, append: Callable[[Sequence[Record]], None], event: Event, now: float
) -> Iterator[tuple[tuple[Record, ...], tuple[Command, ...]]]:
    """Handle an event and all that follows from it: decide, journal, apply; yield each step.

    A step is the records that are on disk now and the commands to execute, in their order. append: the journal's; if it raises,
    the step has not happened. Run the iterator to its end under one lock, and again with `Tick` whenever
    `Coordinator.next_deadline` has come. Raises BrokenError if a step is in the journal and could not be applied, FederatedError if
    steps never end.
    """
    for number in range(_MAX_STEPS):
        decision = coordinator.decide(event if number == 0 else Tick(), now)
        if number and not decision:
            return
        append(decision.records)
        try:
            coordinator.apply(decision)
        except Exception as error:
            raise BrokenError(
                f"{type(decision.event).__name__} is in the journal and could not be applied ({type(error).__name__}: {error}): what "
                "this process knows of the run is half true, so it does nothing more; start the server again, it resumes from the journal"
            ) from error
        if decision:
            yield decision.records, decision.commands
    raise FederatedError(f"the coordinator does not come to rest; it says: {coordinator.status(now)}")
