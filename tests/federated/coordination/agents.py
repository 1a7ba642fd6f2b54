"""A node that does what nodes are to do: it keeps what it has finished until that is committed, and survives its server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.federated.coordination.worlds import NodeSends, Plan, World, kind_of, update_of

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.events import EvaluatePlan, FitPlan
from arclight.federated.protocol import ActiveWork, Close, Evaluated, Heartbeat, HeldRound, Join, Receipt, WorkRequest


class Killed(BaseException):
    """The server's process has died."""


@dataclass
class Agent:
    world: World
    name: str
    clients: tuple[str, ...] = ()
    ticks: int = 2
    """Steps that a fit takes."""
    session: str = ""
    joined: int = 0
    work: FitPlan | EvaluatePlan | None = None
    done: int = 0
    kept: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Finished rounds of clients, and whether the server has said that it has them."""
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)
    """Of rounds, as their newest orders say."""
    fits: list[tuple[str, int]] = field(default_factory=list)
    """Begun ones, in their order."""
    closed: bool = False

    def step(self) -> None:
        """One beat of the node's life."""
        if not self.closed and (self.session or self._join()):
            self._deliver()
            active = [] if self.work is None else [self.work]
            self._say(
                Heartbeat,
                active_work=tuple(
                    ActiveWork(
                        client=x.client,
                        round=x.round,
                        kind=kind_of(x),
                        steps=self.done,
                        attempt=getattr(x, "discarded", 0),
                    )
                    for x in active
                ),
            )
            if self.work is None:
                self._take()
            else:
                self._go_on()

    def restarted(self) -> None:
        """This node's process was killed; it goes on where it was."""
        self.session, self.joined = "", self.joined + 1

    def _join(self) -> bool:
        held = [HeldRound(client=client, round=round, finished=True) for client, round in self.kept]
        if isinstance(self.work, FitPlan):
            held.append(HeldRound(client=self.work.client, round=self.work.round, finished=False))
        session = next(self.world._sessions)
        process = f"{self.name} {self.joined}"
        plan = self.world.deliver(
            Join(node=self.name, process=process, clients=self.clients, held=tuple(held)), session
        )
        self.closed = isinstance(plan, Close)
        if isinstance(plan, ev.SessionGranted):
            self.session = session
            self.kept = dict.fromkeys(self.kept, False)
        return bool(self.session)

    def _say(self, make: type[NodeSends], **fields: Any) -> Plan:
        return self._heard(self.world.deliver(make(node=self.name, session=self.session, **fields), self.session))

    def _heard(self, plan: Plan) -> Plan:
        if isinstance(plan, Receipt):
            if plan.reason == "session":
                self.session = ""
            self.kept = {key: told for key, told in self.kept.items() if key[1] > plan.committed}
            if self.work is not None and any(
                one.client == self.work.client and one.round == self.work.round for one in plan.cancel
            ):
                self.work = None
        return plan

    def _take(self) -> None:
        if not self.session:
            return
        plan = self._say(WorkRequest, hold_s=0.0)
        self.closed = isinstance(plan, Close)
        if isinstance(plan, FitPlan | EvaluatePlan):
            if isinstance(plan, FitPlan):
                self.attempts[plan.client, plan.round] = plan.discarded
            if isinstance(plan, FitPlan) and (plan.client, plan.round) in self.kept:
                self.kept[plan.client, plan.round] = False
                return
            self.work, self.done = plan, 0
            if isinstance(plan, FitPlan):
                self.fits.append((plan.client, plan.round))

    def _go_on(self) -> None:
        self.done += 1
        if self.work is None or self.done < self.ticks:
            return
        if isinstance(self.work, FitPlan):
            self.kept[self.work.client, self.work.round] = False
            self.work = None
            self._deliver()
        elif self.session:
            work, self.work = self.work, None
            self._say(Evaluated, client=work.client, round=work.round, samples=1, metrics={"loss": 1.0})

    def _deliver(self) -> None:
        for (client, round), told in list(self.kept.items()):
            if self.session and not told and (client, round) in self.kept:
                update = update_of(self.session, client, round, attempt=self.attempts.get((client, round), 0))
                plan = self._heard(self.world.validated(update, f"{client} {round}"))
                assert isinstance(plan, Receipt)
                if plan.accepted and (client, round) in self.kept:
                    self.kept[client, round] = True
                elif not plan.accepted and plan.reason != "session":
                    self.kept.pop((client, round), None)
