"""Invariants of a coordinator for any order of messages, and deaths at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.federated.coordination.agents import Agent, Killed
from tests.federated.coordination.worlds import NodeHere, World, as_read, update_of

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.events import EvaluatePlan, FitPlan
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundCommitted,
    RoundDiscarded,
    RoundSkipped,
    UpdateAccepted,
    UpdatesLost,
)
from arclight.federated.coordination.run_database import encode
from arclight.federated.coordination.settings import Buffered, Sampling, Streaming, Waiting
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import Close, Evaluated, Failed, Leave, Receipt
from arclight.federated.settings import Federation

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"clients": 4, "waiting": Waiting(quorum=1.0, lease_s=15.0, join_timeout_s=30.0)},
    "skip": {"clients": 4, "waiting": Waiting(lease_s=3.0, join_timeout_s=30.0, on_failed_round="skip")},
    "quorum": {"clients": 5, "waiting": Waiting(quorum=0.6, grace_s=2.0, lease_s=3.0, join_timeout_s=30.0, retries=2)},
    "deadline": {"clients": 4, "waiting": Waiting(quorum=0.5, grace_s=50.0, deadline_s=9.0, join_timeout_s=30.0, retries=3)},
    "sampled": {
        "clients": 9, "evaluate_on": "clients", "waiting": Waiting(quorum=0.75, lease_s=2.0, join_timeout_s=20.0),
        "sampling": Sampling(per_round=4, over_provision=0.5, dropout=0.2),
    },
    "secure": {
        "clients": 7, "secure": SecureSum(), "sampling": Sampling(per_round=4),
        "waiting": Waiting(quorum=1.0, lease_s=3.0, join_timeout_s=30.0, retries=3),
    },
    "buffered": {"clients": 6, "buffered": Buffered(size=2, max_staleness=2), "waiting": Waiting(quorum=0.5, lease_s=3.0, join_timeout_s=30.0)},
    "streaming": {"clients": 3, "local_steps": 9, "streaming": Streaming(fragments=3, overlap=2),
        "waiting": Waiting(quorum=1.0, lease_s=2.0, join_timeout_s=30.0)},
}  # fmt: skip


class Anything(RuleBasedStateMachine):
    """Nodes that do whatever they like, sensible or not."""

    @initialize(which=st.sampled_from(sorted(SETTINGS)), eager=st.booleans())
    def start(self, which: str, eager: bool) -> None:
        self.world = World(Federation(**{"rounds": 4, "local_steps": 5} | SETTINGS[which]), SETTINGS[which]["clients"])
        self.world.eager = eager
        self.nodes: list[NodeHere] = []
        self.requests: dict[str, float] = {}
        self.shadow, self.read = self.fresh(), 0
        self.world.begin()

    def fresh(self) -> Coordinator:
        return Coordinator(self.world.settings, self.world.clients, self.world.seed, "run")

    def client(self, number: int) -> str:
        return str(number % self.world.settings.clients)

    @rule(name=st.integers(0, 3), owned=st.integers(0, 2), again=st.booleans())
    def join(self, name: int, owned: int, again: bool) -> None:
        clients = [self.client(name * 2 + n) for n in range(owned)]
        node = self.world.node(f"node {name}", sorted(set(clients)), process=f"{name} {again}")
        if node.session:
            self.nodes.append(node)

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9), wait=st.sampled_from([0.0, 0.0, 5.0]))
    def ask(self, which: int, wait: float) -> None:
        node = self.nodes[which % len(self.nodes)]
        request = node.hold(wait)
        self.requests[request] = self.world.now + wait
        plan = self.world.answers.get(request)
        if isinstance(plan, FitPlan | EvaluatePlan):
            node.work[plan.client] = plan
            node.plans.append(plan)

    @precondition(lambda self: any(node.work for node in self.nodes))
    @rule(
        data=st.data(), what=st.sampled_from(["deliver", "deliver", "deliver", "fail", "again", "unsound", "damaged"])
    )
    def work(self, data: st.DataObject, what: str) -> None:
        node = data.draw(st.sampled_from([node for node in self.nodes if node.work]))
        client = data.draw(st.sampled_from(sorted(node.work)))
        plan = node.work[client]
        node.forget(client, plan.round)
        common = {"node": node.name, "session": node.session, "client": client, "round": plan.round}
        if isinstance(plan, EvaluatePlan) and what == "deliver":
            self.world.deliver(Evaluated(**common, samples=2, metrics={"loss": 1.0}), node.session)  # type: ignore[arg-type]
        elif what == "deliver":
            node.deliver(client, plan.round)
        elif what in ("fail", "again"):
            self.world.deliver(Failed(**common, error="x", retryable=what == "again"), node.session)  # type: ignore[arg-type]
        else:
            update = update_of(node.session, client, plan.round)
            self.world.rejected(update, "damaged" if what == "damaged" else "not_finite", "x")

    @precondition(lambda self: self.nodes)
    @rule(
        which=st.integers(0, 9),
        client=st.integers(0, 9),
        round=st.integers(-1, 6),
        digest=st.sampled_from(["", "other"]),
    )
    def deliver_anything(self, which: int, client: int, round: int, digest: str) -> None:
        self.nodes[which % len(self.nodes)].deliver(self.client(client), round, digest)

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9), steps=st.dictionaries(st.integers(0, 9), st.integers(0, 5), max_size=3))
    def beat(self, which: int, steps: dict[int, int]) -> None:
        self.nodes[which % len(self.nodes)].beat({self.client(n): done for n, done in steps.items()})

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        node = self.nodes.pop(which % len(self.nodes))
        assert isinstance(self.world.deliver(Leave(node=node.name, session=node.session), node.session), Receipt)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 40.0]))
    def time(self, seconds: float) -> None:
        self.world.pass_(seconds)
        for request, until in list(self.requests.items()):
            if until <= self.world.now:
                assert request in self.world.answers, f"{request} was held too long"
                del self.requests[request]

    @precondition(lambda self: not self.world.eager)
    @rule()
    def fold(self) -> None:
        folds, state = self.world.folds, self.world.coordinator.state
        if folds and folds[-1].round == state.committed + 1 and state.open[folds[-1].round].closed is not None:
            self.world.tell(self.world.committed(self.world.folds[-1]))

    @precondition(lambda self: not self.world.eager)
    @rule(blamed=st.sets(st.integers(0, 8), max_size=2))
    def fold_fails(self, blamed: set[int]) -> None:
        folds, state = self.world.folds, self.world.coordinator.state
        if folds and folds[-1].round == state.committed + 1 and state.open[folds[-1].round].closed is not None:
            clients = tuple(self.client(number) for number in sorted(blamed))
            self.world.tell(ev.AggregationFailed(round=folds[-1].round, why="x", clients=clients))

    @rule(lost=st.sets(st.integers(0, 8), max_size=4))
    def restart(self, lost: set[int]) -> None:
        if self.world.coordinator.state.ended is None or self.world.coordinator.state.failed:
            self.requests.clear()
            self.nodes.clear()
            self.world.restart({self.client(number) for number in lost})

    @rule(taken_up=st.booleans())
    def shorten(self, taken_up: bool) -> None:
        """The journal begins anew; sometimes those who check it have read nothing else."""
        self.world.shorten()
        if taken_up:
            self.shadow = self.fresh()
            self.shadow.replay(self.world.saved)
            self.read = len(self.world.journal)

    @invariant()
    def the_journal_is_the_state(self) -> None:
        while self.read < len(self.world.journal):
            record = self.world.journal[self.read]
            self.shadow.replay([as_read(record)])
            self.read += 1
        for event in (ev.Tick(), ev.StopRequested(why="x")):  # deciding changes nothing
            first = self.world.coordinator.decide(event, self.world.now)
            assert self.world.coordinator.decide(event, self.world.now) == first
        assert repr(self.shadow.state) == repr(
            self.world.coordinator.state
        )  # in the same order, too: commands go by it

    @invariant()
    def rounds_are_committed_once_and_only_of_accepted_updates(self) -> None:
        check(self.world.settings, self.world.journal)

    @invariant()
    def nothing_grows(self) -> None:
        state, clients = self.world.coordinator.state, self.world.settings.clients
        assert len(state.open) <= 4
        assert sum(map(len, state.assigned.values())) <= clients * 4
        assert len(state.recently_aggregated) <= clients
        assert len(self.world.coordinator.cluster.assignments) <= clients * 8

    def teardown(self) -> None:
        """Run to the end from any state with well-behaved nodes."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.eager = True
        self.fold()
        finish(world, [Agent(world, f"good {n}") for n in range(2)])
        assert world.coordinator.state.ended is not None, world.coordinator.status(world.now)


def check(settings: Federation, journal: Sequence[Record]) -> None:
    accepted: dict[int, dict[str, int]] = {}
    closed: dict[int, tuple[str, ...]] = {}
    committed = []
    for record in journal:
        if isinstance(record, UpdateAccepted):
            assert record.round not in closed, "an update was taken for a closed round"
            assert record.client not in accepted.setdefault(record.round, {}), "a client was taken twice"
            accepted[record.round][record.client] = record.round - record.staleness
        elif isinstance(record, RoundClosed):
            assert record.round not in closed
            assert set(record.clients) == set(accepted[record.round])
            assert list(record.clients) == sorted(record.clients, key=int)
            closed[record.round] = record.clients
        elif isinstance(record, ClientFailed):
            if record.round not in closed and not settings.buffered:
                accepted.get(record.round, {}).pop(record.client, None)
        elif isinstance(record, RoundDiscarded):
            accepted[record.round], _ = {}, closed.pop(record.round, None)
        elif isinstance(record, RoundSkipped):
            assert settings.waiting.on_failed_round == "skip"
            assert record.round not in closed
            accepted[record.round], closed[record.round] = {}, ()
        elif isinstance(record, UpdatesLost):
            for client in record.clients:
                del accepted[record.round][client]
            left = tuple(client for client in closed.pop(record.round, ()) if client not in record.clients)
            if settings.buffered and left:
                closed[record.round] = left
        elif isinstance(record, RoundCommitted):
            assert record.round == 0 or record.round in closed
            committed.append(record.round)
    assert committed == list(range(len(committed)))
    folded = [(client, begun) for updates in accepted.values() for client, begun in updates.items()]
    assert len(folded) == len(set(folded)), "an update was folded twice"
    assert len(committed) <= settings.rounds + 1


def finish(world: World, agents: Sequence[Agent], seconds: float = 2000.0) -> None:
    until = world.now + seconds
    while world.coordinator.state.ended is None and world.now < until:
        world.pass_(0.4)
        for agent in agents:
            agent.step()


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_invariants_hold_for_any_order_of_messages(examples: int) -> None:
    given = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Anything, settings=given)


QUICK = {
    ("all", False, True, True),
    ("sampled", False, False, False),
    ("buffered", True, False, True),
    ("streaming", True, True, False),
}
"""One for each kind of run, which together have every pair of the other three choices."""
KILLS = [
    case for which, *choices in sorted(QUICK) for case in ((which, *choices), (which, *(not one for one in choices)))
]
"""And beside each its opposite: so every kind of run meets both values of each choice."""


@pytest.mark.parametrize(
    ("which", "written_first", "lost", "shortened"),
    [
        pytest.param(
            which, written, ("0", "2", "3") if lost else (), shortened,
            marks=() if (which, written, lost, shortened) in QUICK else pytest.mark.slow,
            id=f"{which}-{written}-{'power' if lost else 'killed'}-{shortened}",
        )
        for which, written, lost, shortened in KILLS
    ],
)  # fmt: skip
def test_a_server_killed_at_any_write_ends_with_the_same_contributors_and_no_fit_twice(
    which: str, written_first: bool, lost: tuple[str, ...], shortened: bool
) -> None:
    options = (
        {"rounds": 3, "local_steps": 6, "evaluate_every": 2}
        | SETTINGS[which]
        | {"waiting": Waiting(heartbeat_interval_s=0.4, lease_s=15.0)}
    )
    if which == "sampled":
        options["sampling"] = Sampling(per_round=4, dropout=0.2)
    expected, fits, writes = lived(Federation(**options), None, written_first)
    assert len(expected) == 3
    assert writes > 10
    for at in range(1, writes):
        found, again, _ = lived(Federation(**options), at, written_first, lost, shortened)
        assert len(again) == len(set(again)), f"killed at write {at}, a fit was done twice: {again}"
        if which != "buffered":  # where who is in time decides
            assert found == expected, f"killed at write {at}"
            assert sorted(again) == sorted(fits)


def lived(
    federation: Federation,
    kill_at: int | None,
    written_first: bool,
    lost: tuple[str, ...] = (),
    shortened: bool = False,
) -> tuple[dict[int, tuple[str, ...]], list[tuple[str, int]], int]:
    """A run whose server is killed at one write to its journal, and may lose updates: contributors, fits begun, and writes.

    shortened: its journal begins anew all the time.
    """
    world = World(federation, federation.clients)
    agents = [Agent(world, f"node {n}") for n in range(2)]
    writes = 0

    class Mortal(list[Record]):
        def extend(self, records: Any) -> None:
            nonlocal writes
            if records:
                writes += 1
            dies = bool(records) and writes == kill_at
            if not dies or written_first:
                super().extend(records)
            if dies:
                raise Killed

    world.journal = Mortal()
    survived(world, world.begin, lost)
    while world.coordinator.state.ended is None:
        assert world.now < 500, world.coordinator.status(world.now)
        survived(world, lambda: world.pass_(0.2), lost)
        for agent in agents:
            survived(world, agent.step, lost)
            if shortened:
                world.shorten()
    assert world.coordinator.state.ended == "all 3 rounds are done"
    check(federation, world.journal)
    return world.closed(), [fit for agent in agents for fit in agent.fits], writes


def survived(world: World, act: Any, lost: tuple[str, ...]) -> None:
    try:
        act()
    except Killed:
        world.now += 0.3
        if world.journal and len(world.journal) >= 2:
            world.restart(lost)
        else:
            world.journal.clear()
            world.coordinator = Coordinator(world.settings, world.clients, world.seed, "run")
            world.begin()


def test_a_killed_node_goes_on_where_it_was_and_the_contributors_are_the_same() -> None:
    federation = Federation(clients=4, rounds=2, local_steps=6, waiting=Waiting(heartbeat_interval_s=0.4, lease_s=10.0))
    for at in range(30):
        for away in (1, 8):
            world = World(federation, 4).begin()
            agents = [Agent(world, "first", ("0", "1"), ticks=3), Agent(world, "second", ("2", "3"), ticks=3)]
            for beat in range(200):
                if world.coordinator.state.ended is not None:
                    break
                world.pass_(0.3)
                if beat == at:
                    agents[0].restarted()
                for agent in agents[1:] if at <= beat < at + away else agents:
                    agent.step()
            assert world.closed() == {1: ("0", "1", "2", "3"), 2: ("0", "1", "2", "3")}, (at, away)
            assert all(len(agent.fits) == len(set(agent.fits)) for agent in agents)


@pytest.mark.parametrize("at", [0, 3, 9, 20])
def test_of_thirty_two_clients_on_two_nodes_none_is_missing_when_one_node_dies(at: int) -> None:
    world = World(
        Federation(clients=32, rounds=2, local_steps=6, waiting=Waiting(lease_s=5.0, join_timeout_s=60.0)), 32
    ).begin()
    agents = [Agent(world, "first"), Agent(world, "second")]
    for beat in range(400):
        if world.coordinator.state.ended is not None:
            break
        world.pass_(0.4)
        for agent in agents if beat < at else agents[1:]:
            agent.step()
    assert {round: len(clients) for round, clients in world.closed().items()} == {1: 32, 2: 32}
    assert agents[1].fits
    assert len(set(agents[1].fits)) == len(agents[1].fits)


def test_closing_reaches_every_node() -> None:
    world = World(Federation(clients=1, rounds=1), 1).begin()
    node = world.node("n")
    held = node.hold()
    assert isinstance(world.answers[held], FitPlan)
    second = world.node("m")
    waiting = second.hold()
    world.tell(ev.StopRequested(why="a person said so"))
    plan = world.answers[waiting]
    assert isinstance(plan, Close)
    assert plan.reason == "a person said so"
    assert world.coordinator.next_deadline() is None


@pytest.mark.parametrize(
    "which",
    [which if which in ("all", "secure", "streaming") else pytest.param(which, marks=pytest.mark.slow) for which in sorted(SETTINGS)],
)  # fmt: skip
def test_journal_snapshots_do_not_grow_with_the_rounds(which: str) -> None:
    world = World(Federation(**{"rounds": 160, "local_steps": 6} | SETTINGS[which]), SETTINGS[which]["clients"]).begin()  # fmt: skip
    agents, sizes = [Agent(world, f"node {n}") for n in range(2)], dict[int, int]()
    while world.coordinator.state.ended is None:
        world.pass_(0.4)
        for agent in agents:
            agent.step()
        assert world.now < 5000, world.coordinator.status(world.now)
        sizes[world.coordinator.state.committed] = len(encode(world.coordinator.saved()))
    assert max(sizes.values()) < 1.05 * max(size for round, size in sizes.items() if round < 120)
