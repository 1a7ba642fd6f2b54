"""A driver and nodes on a virtual clock around a real coordinator, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.driving import drive
from arclight.federated.coordination.events import Command, EvaluatePlan, Event, FitPlan
from arclight.federated.coordination.records import Record, RoundClosed, RoundOpened, UpdatesLost
from arclight.federated.protocol import Close, Held, Receipt, Wait
from arclight.federated.settings import Federation

Plan = ev.Welcoming | FitPlan | EvaluatePlan | Wait | Close | Receipt


@dataclass
class World:
    """The server's side: a journal in memory, answers by request, and folds that are done when a test says so."""

    settings: Federation
    clients: Sequence[str] | int
    seed: int = 3
    now: float = 0.0
    journal: list[Record] = field(default_factory=list)
    answers: dict[str, Plan] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    folds: list[ev.Fold] = field(default_factory=list)
    ended: ev.End | None = None
    eager: bool = True
    """Whether folds are done at once."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, self.clients, self.seed, "run")
        self._requests = (f"request {n}" for n in itertools.count())
        self._sessions = (f"session {n}" for n in itertools.count())

    def begin(self) -> World:
        self.tell(ev.Begun(base="weights 0", checkpoint="000000"))
        return self

    def tell(self, event: Event) -> None:
        waiting = [event]
        while waiting:
            for records, commands in drive(self.coordinator, self.journal.extend, waiting.pop(0), self.now):
                assert not any(isinstance(r, RoundOpened) and not r.clients for r in records)
                for command in commands:
                    self.commands.append(command)
                    if isinstance(command, ev.Answer):
                        assert command.to not in self.answers, f"{command.to} was answered twice"
                        self.answers[command.to] = command.plan
                    elif isinstance(command, ev.Fold):
                        self.folds.append(command)
                        if self.eager:
                            waiting.append(self.committed(command))
                    elif isinstance(command, ev.Measure):
                        waiting.append(ev.Measured(round=command.round, samples=1, metrics={"loss": 1.0}))
                    elif isinstance(command, ev.End):
                        self.ended = command

    @staticmethod
    def committed(fold: ev.Fold) -> ev.Committed:
        return ev.Committed(
            round=fold.round, base=f"weights {fold.round}", checkpoint=f"{fold.round:06d}", norm=1.0
        )  # fmt: skip

    def restart(self, lost: Collection[str] = ()) -> None:
        """The server is killed and comes back with what is in its journal; nodes and requests are gone.

        lost: clients whose accepted updates a power failure has taken with it.
        """
        self.coordinator = Coordinator(self.settings, self.clients, self.seed, "run")
        self.coordinator.replay(self.journal)
        for open in list(self.coordinator.state.open.values()):
            if gone := tuple(client for client in open.accepted if client in lost):
                self.journal.append(UpdatesLost(round=open.round, clients=gone))
                self.coordinator.replay(self.journal[-1:])
        self.folds = []
        self.tell(ev.Resumed())

    def ask(self, make: type[ev.Said], **fields: object) -> str:
        to = next(self._requests)
        self.tell(make(to=to, **fields))  # type: ignore[arg-type]
        return to

    def said(self, make: type[ev.Said], **fields: object) -> Plan:
        """The answer to a message that is answered at once."""
        return self.answers[self.ask(make, **fields)]

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

    def node(self, name: str, clients: Sequence[str] = (), *, process: str = "", held: Sequence[Held] = ()) -> NodeHere:
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

    def join(self, held: Sequence[Held] = ()) -> Plan:
        session = next(self.world._sessions)
        plan = self.world.said(
            ev.Joined, node=self.name, session=session, process=self.process, clients=self.clients, held=tuple(held)
        )
        if isinstance(plan, ev.Welcoming):
            self.session = session
        return plan

    def beat(self, steps: dict[str, int] | None = None) -> Receipt:
        plan = self.world.said(
            ev.Beaten, session=self.session, steps=dict.fromkeys(self.work, 0) if steps is None else steps
        )
        assert isinstance(plan, Receipt)
        for client in plan.cancel:
            self.work.pop(client, None)
        return plan

    def hold(self, wait: float = 20.0) -> str:
        return self.world.ask(ev.Asked, session=self.session, wait=wait)

    def take(self, wait: float = 0.0) -> Plan:
        """What there is to do now."""
        plan = self.world.answers[self.hold(wait)]
        if isinstance(plan, FitPlan | EvaluatePlan):
            self.work[plan.client] = plan
        return plan

    def deliver(self, client: str, round: int | None = None, digest: str | None = None) -> Receipt:
        if round is None:
            round = self.work[client].round
        plan = self.world.said(
            ev.UpdateChecked, session=self.session, client=client, round=round, digest=digest or f"{client} {round}",
            samples=10, tokens=20, steps=5, seconds=1.0, bytes=100, norm=1.0, metrics={"train/loss": 2.0},
        )  # fmt: skip
        assert isinstance(plan, Receipt)
        if plan.accepted:
            self.work.pop(client, None)
        return plan

    def fail(self, client: str, *, again: bool = False, error: str = "out of memory") -> Receipt:
        plan = self.world.said(
            ev.WorkFailed, session=self.session, client=client, round=self.work.pop(client).round, error=error, again=again
        )  # fmt: skip
        assert isinstance(plan, Receipt)
        return plan

    def run(self) -> int:
        """Do all that there is to do now; how many updates that was."""
        done = 0
        while isinstance(plan := self.take(), FitPlan | EvaluatePlan):
            if isinstance(plan, FitPlan):
                done += self.deliver(plan.client).accepted
            else:
                self.work.pop(plan.client)
                self.world.said(
                    ev.EvaluatedBy, session=self.session, client=plan.client, round=plan.round, samples=4, metrics={"loss": 0.5}
                )  # fmt: skip
        return done
