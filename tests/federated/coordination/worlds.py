"""A driver and nodes on a virtual clock around a real coordinator, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.coordinator import Coordinator, run_to_quiescence
from arclight.federated.coordination.events import Command, EvaluatePlan, Event, FitPlan
from arclight.federated.coordination.records import Record, RoundClosed, RoundOpened
from arclight.federated.coordination.run_database import decode, encode
from arclight.federated.errors import Reason
from arclight.federated.protocol import (
    ActiveWork,
    Close,
    Evaluated,
    Failed,
    Heartbeat,
    HeldRound,
    Join,
    Leave,
    Manifest,
    Receipt,
    Update,
    Wait,
    WorkRequest,
)
from arclight.federated.settings import Federation

NodeSends = Join | WorkRequest | Heartbeat | Evaluated | Failed | Leave
Plan = ev.SessionGranted | FitPlan | EvaluatePlan | Wait | Close | Receipt


@dataclass
class World:
    """The server's side: a journal in memory, answers by request, and folds that are done when a test says so."""

    settings: Federation
    clients: Sequence[str] | int
    seed: int = 3
    now: float = 0.0
    journal: list[Record] = field(default_factory=list)
    """All that was ever written."""
    saved: list[Record] = field(default_factory=list)
    """The state that the journal begins with where it was shortened."""
    shortened: int = 0
    """Records that the state stands for."""
    answers: dict[str, Plan] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    folds: list[ev.Aggregate] = field(default_factory=list)
    ended: ev.RunOver | None = None
    eager: bool = True
    """Whether folds are done at once."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, self.clients, self.seed, "run")
        self._requests = (f"request {n}" for n in itertools.count())
        self._sessions = (f"session {n}" for n in itertools.count())

    def begin(self) -> World:
        self.tell(ev.RunStarted(base="weights 0", checkpoint="000000"))
        return self

    def tell(self, event: Event) -> None:
        waiting = [event]
        while waiting:
            for records, commands in run_to_quiescence(self.coordinator, self.journal.extend, waiting.pop(0), self.now):
                assert not any(isinstance(r, RoundOpened) and not r.clients for r in records)
                for command in commands:
                    self.commands.append(command)
                    if isinstance(command, ev.Answer):
                        assert command.to not in self.answers, f"{command.to} was answered twice"
                        self.answers[command.to] = command.plan
                    elif isinstance(command, ev.Aggregate):
                        self.folds.append(command)
                        if self.eager:
                            waiting.append(self.committed(command))
                    elif isinstance(command, ev.EvaluateOnServer):
                        waiting.append(ev.ServerEvaluated(round=command.round, samples=1, metrics={"loss": 1.0}))
                    elif isinstance(command, ev.RunOver):
                        self.ended = command

    @staticmethod
    def committed(fold: ev.Aggregate) -> ev.RoundStored:
        return ev.RoundStored(
            round=fold.round, base=f"weights {fold.round}", checkpoint=f"{fold.round:06d}", norm=1.0
        )  # fmt: skip

    def restart(self, lost: Collection[str] = ()) -> None:
        """The server is killed and comes back with what is in its journal; nodes and requests are gone.

        lost: clients whose accepted updates a power failure has taken with it.
        """
        self.coordinator = Coordinator(self.settings, self.clients, self.seed, "run")
        self.coordinator.replay((*self.saved, *self.journal[self.shortened :]))
        for open in list(self.coordinator.state.open.values()):
            if gone := tuple(client for client in open.accepted if client in lost):
                lost_now = self.coordinator.lost(open.round, gone)
                self.journal.extend(lost_now)
                self.coordinator.replay(lost_now)
        self.folds = []
        self.tell(ev.RunResumed())

    def shorten(self) -> None:
        """The journal begins with the state from here on."""
        self.saved, self.shortened = [as_read(self.coordinator.saved())], len(self.journal)

    def ask(self, message: NodeSends, session: str) -> str:
        return self._request(ev.NodeMessage, message=message, session=session)

    def deliver(self, message: NodeSends, session: str) -> Plan:
        """The answer to a message that is answered at once."""
        return self.answers[self.ask(message, session)]

    def validated(self, update: Update, digest: str) -> Plan:
        """The answer to an update that was found sound."""
        return self.answers[
            self._request(ev.UpdateValidated, message=update, session=update.session, digest=digest, norm=1.0)
        ]

    def rejected(self, update: Update, reason: Reason, why: str) -> Plan:
        """The answer to an update that was found unsound."""
        return self.answers[
            self._request(ev.UpdateRejected, message=update, session=update.session, reason=reason, why=why)
        ]

    def _request(self, make: type[ev.NodeMessage], **fields: object) -> str:
        to = next(self._requests)
        self.tell(make(to=to, **fields))  # type: ignore[arg-type]
        return to

    def until(self, time: float) -> None:
        """Let the time go on, with a tick at every deadline on the way."""
        for _ in range(100_000):
            due = self.coordinator.next_deadline()
            if due is None or due > time:
                self.now = max(self.now, time)
                return
            self.now = max(self.now, due)
            self.tell(ev.Tick())
        raise AssertionError("time does not go on")

    def pass_(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def node(
        self, name: str, clients: Sequence[str] = (), *, process: str = "", held: Sequence[HeldRound] = ()
    ) -> NodeHere:
        node = NodeHere(self, name, tuple(clients), process or name)
        node.join(held)
        return node

    def closed(self) -> dict[int, tuple[str, ...]]:
        return {record.round: record.clients for record in self.journal if isinstance(record, RoundClosed)}


@dataclass
class NodeHere:
    """A node of one worker."""

    world: World
    name: str
    clients: tuple[str, ...]
    process: str
    session: str = ""
    work: dict[str, FitPlan | EvaluatePlan] = field(default_factory=dict)
    """The newest of each client."""
    plans: list[FitPlan | EvaluatePlan] = field(default_factory=list)
    """All that it has said that it has."""

    def join(self, held: Sequence[HeldRound] = ()) -> Plan:
        session = next(self.world._sessions)
        join = Join(node=self.name, process=self.process, clients=self.clients, held=tuple(held))
        plan = self.world.deliver(join, session)
        if isinstance(plan, ev.SessionGranted):
            self.session = session
        return plan

    def active_work(self, steps: dict[str, int] | None = None) -> tuple[ActiveWork, ...]:
        """Return the work that the node holds, or only that of the clients in ``steps``."""
        here = [plan for plan in (*self.plans, *self.work.values()) if steps is None or plan.client in steps]
        return tuple(
            ActiveWork(
                client=plan.client,
                round=plan.round,
                kind=kind_of(plan),
                steps=(steps or {}).get(plan.client, 0),
                attempt=plan.discarded if isinstance(plan, FitPlan) else 0,
            )
            for plan in dict.fromkeys(here)
        )

    def beat(self, steps: dict[str, int] | None = None) -> Receipt:
        plan = self.world.deliver(
            Heartbeat(node=self.name, session=self.session, active_work=self.active_work(steps)), self.session
        )
        assert isinstance(plan, Receipt)
        for one in plan.cancel:
            self.forget(one.client, one.round)
        return plan

    def forget(self, client: str, round: int) -> None:
        self.plans = [plan for plan in self.plans if (plan.client, plan.round) != (client, round)]
        if client in self.work and self.work[client].round == round:
            del self.work[client]

    def hold(self, wait: float = 20.0) -> str:
        return self.world.ask(
            WorkRequest(node=self.name, session=self.session, hold_s=wait, active_work=self.active_work()), self.session
        )

    def take(self, wait: float = 0.0) -> Plan:
        """Request work."""
        plan = self.world.answers[self.hold(wait)]
        if isinstance(plan, FitPlan | EvaluatePlan):
            self.work[plan.client] = plan
            self.plans.append(plan)
        return plan

    def deliver(self, client: str, round: int | None = None, digest: str | None = None) -> Receipt:
        plan = self.work.get(client)
        if round is None:
            round = self.work[client].round
        attempt = plan.discarded if isinstance(plan, FitPlan) and plan.round == round else 0
        update = update_of(
            self.session,
            client,
            round,
            samples=10,
            tokens=20,
            steps=5,
            metrics={"train/loss": 2.0},
            size_bytes=100,
            attempt=attempt,
        )
        receipt = self.world.validated(update, digest or f"{client} {round}")
        assert isinstance(receipt, Receipt)
        if receipt.accepted:
            self.forget(client, round)
        return receipt

    def fail(self, client: str, *, again: bool = False, error: str = "out of memory") -> Receipt:
        round = self.work[client].round
        self.forget(client, round)
        who = {"node": self.name, "session": self.session, "client": client}
        plan = self.world.deliver(Failed(**who, round=round, error=error, retryable=again), self.session)  # type: ignore[arg-type]
        assert isinstance(plan, Receipt)
        return plan

    def run(self) -> int:
        """Do all that there is to do now; how many updates that was."""
        done = 0
        while isinstance(plan := self.take(), FitPlan | EvaluatePlan):
            if isinstance(plan, FitPlan):
                done += self.deliver(plan.client).accepted
            else:
                self.forget(plan.client, plan.round)
                who = {"node": self.name, "session": self.session, "client": plan.client}
                measured = Evaluated(**who, round=plan.round, samples=4, metrics={"loss": 0.5})  # type: ignore[arg-type]
                self.world.deliver(measured, self.session)
        return done


def update_of(session: str, client: str, round: int, *, size_bytes: int = 1, **fields: Any) -> Update:
    """An update of one sample and one step, unless ``fields`` say otherwise."""
    manifest = Manifest(kind="update", tensors={}, blobs={"": size_bytes})
    said = {"samples": 1, "tokens": 1, "steps": 1, "seconds": 1.0} | fields
    return Update(node="", session=session, client=client, round=round, manifest=manifest, **said)


def as_read(record: Record) -> Record:
    """A record as the journal gives it back."""
    return decode(encode(record), Path())


def kind_of(plan: FitPlan | EvaluatePlan) -> Literal["fit", "evaluate"]:
    return "fit" if isinstance(plan, FitPlan) else "evaluate"
