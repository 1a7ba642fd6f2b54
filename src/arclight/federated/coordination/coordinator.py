"""Which client does what when: the rounds of a run as a state machine without input, output or clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from arclight.federated.coordination import events as ev
from arclight.federated.coordination import message_rules, round_rules
from arclight.federated.coordination.cluster import (
    Assignment,
    ClusterState,
    DeadlinePassed,
    DuplicateJoin,
    EvaluationSkipped,
    NodeEvicted,
    Retry,
    TimerFired,
    Unassigned,
)
from arclight.federated.coordination.events import Answer, Command, Decision, EvaluatePlan, Event, FitPlan, Note, Tick
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
from arclight.federated.coordination.run_state import RecordApplier, RunState, StateSaved
from arclight.federated.coordination.sampling import Roster, Sampler
from arclight.federated.errors import FederatedError, Reason
from arclight.federated.settings import Federation

_FREE = {
    "rounds",
    "waiting",
    "journal_every",
    "evaluate_every",
    "evaluate_on",
    "keep_rounds",
    "down_changes",
    "blobs_at",
}
"""Settings that may change when a run is taken up again."""


def settings_digest(settings: Federation, roster: Roster, seed: int) -> str:
    """SHA-256 of what decides a run's result. Fields at their defaults do not count, so that new ones may come."""
    said = [f"{len(roster)} clients of {roster.name(0)} to {roster.name(len(roster) - 1)}, seed {seed}"]
    usual = Federation(clients=settings.clients)
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name not in _FREE and item.name != "clients" and value != getattr(usual, item.name):
            said.append(f"{item.name}={value!r}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


class Coordinator:
    """See `arclight.federated.coordination.events` for how it is driven.

    clients: their names, or how many ("0", "1", ...). seed: of draws. run: name of the run, which nodes and journal repeat.
    """

    def __init__(self, settings: Federation, clients: Sequence[str] | int, seed: int, run: str) -> None:
        self.settings, self.run = settings, run
        self.roster = Roster(clients)
        self.sampler = Sampler(settings.sampling, self.roster, seed)
        self._replay = RecordApplier(settings, self.sampler, run, settings_digest(settings, self.roster, seed))
        self._present = ClusterState(settings.waiting, self._replay.state, settings.overlap)

    @property
    def state(self) -> RunState:
        """What the journal says. To be read only."""
        return self._replay.state

    @property
    def rules(self) -> RecordApplier:
        return self._replay

    @property
    def present(self) -> ClusterState:
        """Nodes and work of this moment. To be read only."""
        return self._present

    def bases(self) -> frozenset[str]:
        """Digests of weights that somebody may still be told to begin from, to measure, or to go back to."""
        state = self.state
        found = {*state.bases.values(), *(open.base for open in state.begun.values())}
        found |= {measuring.base for measuring in state.measuring.values()}
        return frozenset(found - {""})

    def next_deadline(self) -> float | None:
        """When a `Tick` is due at the latest; minus infinity: now. None only before a run has begun and after it has ended."""
        if round_rules.urgent(self):
            return float("-inf")
        if self.state.ended is not None:
            return None
        return self._present.timers[0].at if self._present.timers else None

    def next_alarm(self) -> float | None:
        """When something is due by the time alone; None before a run has begun and after it has ended."""
        timers = self._present.timers
        return timers[0].at if timers and self.state.ended is None else None

    def about(self, now: float) -> str:
        """Who and what is waited for, for logs."""
        return round_rules.about(self, now)

    # -- what has happened -------------------------------------------------------------------------------------------------

    def replay(self, records: Iterable[Record]) -> None:
        """Bring back the lasting state. Raises FederatedError where the records are of another run or other settings."""
        for record in records:
            self._replay.apply(record)

    def saved(self, told: Iterable[dict[str, Any]] = ()) -> StateSaved:
        """A record that stands for all so far. It is of the state itself, so that it is to be written before anything else happens."""
        return StateSaved(state=self.state, told=tuple(told))

    def apply(self, decision: Decision) -> None:
        """Make a decision true, once its records are on disk."""
        present, now = self._present, decision.now
        for note in decision.notes:
            if isinstance(note, TimerFired):
                present.ring(note.again)
        self._heed(decision.event, now)
        for record in decision.records:
            self._replay.apply(record)
            self._follow(record, decision.event, now)
        for command in decision.commands:
            self._obey(command, decision.event, now)
        for note in decision.notes:
            self._note(note, decision.event, now)
        if any(isinstance(r, RoundClosed | RoundSkipped | RoundCommitted | RunEnded) for r in decision.records):
            present.prune(now)

    def _heed(self, event: Event, now: float) -> None:
        """What an event changes by itself, whatever was decided."""
        present = self._present
        session = getattr(event, "session", None)
        node = present.sessions.get(session) if session is not None else None
        match event:
            case ev.RunStarted() | ev.RunResumed():
                if isinstance(event, ev.RunResumed):
                    present.settled = False
                    present.started = self.state.opened > self.state.committed or self.state.committed > 0
                    present.arm(now + self.settings.waiting.silence, "settle")
                present.alone(now)
                present.arm(now + round_rules.SAY_EVERY, "say")
                for open in self.state.open.values() if isinstance(event, ev.RunResumed) else ():
                    self._opened(open.round, now)
                for round in self.state.measuring if isinstance(event, ev.RunResumed) else ():
                    self._to_measure(round, now)
            case ev.Asked() if node is not None:
                present.named(node, event.doing, now)
                present.heard(node, now, progress=not node.tasks)
                present.asked(event.to, node, now, event.wait)
            case ev.Beaten() if node is not None:
                present.named(node, event.doing, now)
            case _ if node is not None:
                present.heard(node, now, progress=True)

    def _follow(self, record: Record, event: Event, now: float) -> None:
        """What a record changes about nodes."""
        present, node = self._present, self._present.sessions.get(getattr(event, "session", ""))
        match record:
            case RoundOpened():
                self._opened(record.round, now)
            case UpdateAccepted():
                present.finish(Assignment("fit", record.round - record.staleness, record.client), node)
                self._quorum(record.round, now)
            case ClientFailed():
                present.finish(Assignment("fit", record.round, record.client), node)
                if record.lost:
                    present.given_up(record.client)
            case RoundDiscarded():
                present.folding = None
                if self.settings.secure is not None:
                    present.put_back(record.round, now)
            case RoundSkipped():
                present.folding = None
            case RoundCommitted():
                present.folding = None
                self._to_measure(record.round, now)
            case RoundEvaluated(client=str(client)):
                present.finish(Assignment("evaluate", record.round, client), node)
            case RoundEvaluated():
                present.prune(now)

    def _opened(self, round: int, now: float) -> None:
        present, state = self._present, self.state
        if self.settings.buffered:  # work that nobody has begun is done from the newest weights
            present.prune(now)
        open = state.open[round]
        if self.settings.waiting.deadline is not None and open.closed is None:
            present.deadlines[round] = now + self.settings.waiting.deadline
            present.arm(present.deadlines[round], "deadline", (round, open.attempt))
        for begun, clients in state.outstanding.items():
            present.add((Assignment("fit", begun, client) for client in clients), now)
        self._quorum(round, now)

    def _quorum(self, round: int, now: float) -> None:
        """Grace begins when there is a quorum."""
        open, grace = self.state.open[round], self.settings.waiting.grace
        key = ("quorum", round, open.attempt)
        if grace is None or key in self._present.over:
            return
        if open.wanted and len(open.accepted) >= self._replay.need(open):
            self._present.over.add(key)
            self._present.arm(now + grace, "grace", (round, open.attempt))

    def _to_measure(self, round: int, now: float) -> None:
        if round in self.state.measuring:
            waiting = self.settings.waiting
            self._present.add((Assignment("evaluate", round, x) for x in self.state.measuring[round].waiting), now)
            self._present.arm(now + (waiting.deadline or waiting.join), "measure", round)

    def _obey(self, command: Command, event: Event, now: float) -> None:
        present = self._present
        match command:
            case Answer(plan=ev.SessionGranted()) if isinstance(event, ev.Joined):
                present.join(event, now)
            case Answer(plan=FitPlan() as plan):
                present.begin(command.to, Assignment("fit", plan.round, plan.client), now)
            case Answer(plan=EvaluatePlan() as plan):
                present.begin(command.to, Assignment("evaluate", plan.round, plan.client), now)
            case Answer():
                present.answered(command.to)
                if (
                    isinstance(event, ev.Left)
                    and command.to == event.to
                    and (node := present.that_leaves(event.session))
                ):
                    present.drop(node, now, event.why)
            case ev.Aggregate():
                present.folding = command.round
            case ev.EvaluateOnServer():
                present.measured.add(command.round)
            case ev.NodeLost() if command.session in present.sessions:
                present.lose(present.sessions[command.session], now)

    def _note(self, note: Note, event: Event, now: float) -> None:
        present = self._present
        match note:
            case NodeEvicted() if note.node in present.nodes:
                present.drop(present.nodes[note.node], now)
            case EvaluationSkipped():
                present.finish(note.work, present.sessions.get(getattr(event, "session", "")))
            case Unassigned():
                present.strand(note.work, note.until)
            case Retry():
                present.again(note.work, now, keep=note.keep)
            case DuplicateJoin():
                present.challengers[note.node] = (note.process, now)
            case DeadlinePassed(what=("settle", _, _)):
                present.settled = True
                present.deal(now)
            case DeadlinePassed(what=("start", _, _)):
                present.started = True
            case DeadlinePassed():
                present.over.add(note.what)

    # -- what follows ------------------------------------------------------------------------------------------------------

    def decide(self, event: Event, now: float) -> Decision:
        """What follows from an event; nothing has changed yet. Raises ProtocolError for an event that cannot be now."""
        return message_rules.decide(self, event, now)

    def lost(self, round: int, clients: Sequence[str]) -> tuple[Record, ...]:
        """What is to be written down, before `RunResumed`, where accepted updates of these clients are not here any more."""
        return message_rules.lost(self, round, clients)

    def refusal(self, session: str, client: str, round: int, digest: str | None = None) -> tuple[Reason, str] | None:
        """Why an update of a client for a round would not be taken; None where it would, or was already.

        digest: of its manifest where that is known; the same update that is sent again is no other one.
        """
        return message_rules.refusal(self, session, client, round, digest)


_MOST = 1_000_000


class BrokenError(FederatedError):
    """A decision that was written down and then not carried through: this coordinator must not be asked again."""


def run_to_quiescence(
    coordinator: Coordinator, append: Callable[[Sequence[Record]], None], event: Event, now: float
) -> Iterator[tuple[tuple[Record, ...], tuple[Command, ...]]]:
    """What an event leads to, step by step: records that are on disk now, and commands to carry out, in their order.

    append: the journal's. What it raises comes through, and then the step has not happened. To be run through to its end, under
    one lock, and again with `Tick` whenever `Coordinator.next_deadline` has come. Raises BrokenError if a step is in the journal
    and the coordinator could not follow it.
    """
    for number in range(_MOST):
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
    raise FederatedError(f"the coordinator does not come to rest; it says: {coordinator.about(now)}")
