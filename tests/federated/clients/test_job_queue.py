"""Jobs of nodes against a real coordinator, in any order of threads, messages and kills."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.federated.clients.sites import MANIFEST
from tests.federated.coordination.worlds import Plan, World

from arclight.federated.clients.job_queue import Job, JobQueue
from arclight.federated.coordination import events as ev
from arclight.federated.coordination.cluster import Assignment
from arclight.federated.coordination.events import FitPlan
from arclight.federated.coordination.settings import Streaming, Waiting
from arclight.federated.protocol import Failed, Fit, Heartbeat, HeldRound, Join, Receipt, Update, WorkRequest
from arclight.federated.settings import Federation

PATIENT = Waiting(lease_s=1e6, join_timeout_s=1e6, no_progress_timeout_s=1e6, attempts=1000, retries=1000)
ROUNDS = 5


@dataclass
class Site:
    """A node whose threads take turns as it is told. ``disk`` outlives it."""

    world: World
    name: str
    clients: tuple[str, ...]
    slots: int
    disk: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Finished rounds, and whether the server has said that it has them."""
    begun: dict[tuple[str, int], None] = field(default_factory=dict)
    completed: dict[str, list[int]] = field(default_factory=dict)
    told: set[tuple[str, int]] = field(default_factory=set)
    failures: int = 0
    failed: set[str] = field(default_factory=set)
    """Clients that have failed."""
    lives: int = 0

    def __post_init__(self) -> None:
        self.completed = {client: [] for client in self.clients}
        self.overlap = self.world.settings.streaming.overlap if self.world.settings.streaming else 0
        self.start()

    def start(self) -> None:
        """A process begins, maybe after another was killed."""
        self.jobs, self.ask, self.session = JobQueue(self.slots, threading.Event()), cast("Any", None), ""
        self.training: list[Job] = []
        self.reporting: list[Job] = []
        self.receipts: dict[Job, Receipt] = {}
        self.lives += 1
        for client, round in [one for one, taken in self.disk.items() if not taken]:
            self.jobs.restore(Job(client, round, cast("Any", None), stage="done", outcome=update(client, round)))

    def acts(self) -> list[Callable[[], None]]:
        """Return the actions that are possible now."""
        found: list[Callable[[], None]] = [self.beat]
        if self.ask is None:
            found.append(self.next_request)
        elif self.ask[1] in self.world.answers:
            found += [self.answered, self.answered, self.answered, self.answer_lost]
        found += [
            lambda job=job: self.jobs.ready(job, cast("Any", None)) for job in self.all() if job.stage == "fetching"
        ]  # type: ignore[misc]
        if len(self.training) < self.slots:
            found.append(self.begin)
        found += [lambda job=job: self.end(job) for job in self.training]  # type: ignore[misc]
        found += [lambda job=job: self.fail(job) for job in self.training if self.failures]  # type: ignore[misc]
        found.append(self.tell)
        found += [lambda job=job: self.send(job) for job in self.reporting]  # type: ignore[misc]
        found += [lambda job=job: self.hear(job) for job in self.receipts]  # type: ignore[misc]
        return found

    def all(self) -> list[Job]:
        return list(self.jobs._jobs)

    # -- talking -------------------------------------------------------------------------------------------------------

    def say(self, send: Callable[[], Plan]) -> Receipt | None:
        """None where the session was lost, and is there again."""
        plan = send() if self.session else None
        if isinstance(plan, Receipt) and plan.reason != "session":
            return plan
        self.join()
        return None

    def join(self) -> None:
        held = [HeldRound(client=client, round=round, finished=True) for client, round in self.disk]
        held += [HeldRound(client=client, round=round, finished=False) for client, round in self.begun]
        session = next(self.world._sessions)
        process = f"{self.name} {self.lives}"
        join = Join(node=self.name, process=process, clients=self.clients, held=tuple(held))
        plan = self.world.deliver(join, session)
        self.session = session if isinstance(plan, ev.SessionGranted) else ""

    def next_request(self) -> None:
        if not self.session:
            self.join()
        number = self.jobs.next_request(self.overlap, self.clients, 8) if self.session else None
        if number is not None:
            active = self.jobs.active_work_for_request()
            ask = WorkRequest(node=self.name, session=self.session, hold_s=20.0, active_work=active)
            self.ask = (number, self.world.ask(ask, self.session))

    def answered(self) -> None:
        (number, request), self.ask = self.ask, None
        match self.world.answers[request]:
            case FitPlan() as plan:
                order = Fit(
                    run="run", client=plan.client, round=plan.round, steps=plan.steps, clock=plan.clock, base=plan.base,
                    weights=MANIFEST, overlap=self.overlap,
                )  # fmt: skip
                job = Job.of(order, cast("Any", None))
                if self.jobs.add(job, number):
                    if (plan.client, plan.round) in self.disk:
                        self.jobs.done(job, update(plan.client, plan.round))
                    else:
                        self.begun[plan.client, plan.round] = None
                else:
                    self.refused(plan)
            case Receipt(reason="session"):
                self.join()

    def refused(self, plan: FitPlan) -> None:
        """The server does not wait in vain for what was not taken: it is here, or follows a failure that may come again."""
        work = Assignment("fit", plan.round, plan.client)
        node = self.world.coordinator.cluster.assignments.get(work)
        waits = node is not None and node.session == self.session and work in node.tasks
        mine = [job for job in self.all() if job.client == plan.client]
        assert not waits or plan.client in self.failed or any(job.round == plan.round for job in mine), work

    def answer_lost(self) -> None:
        self.ask = None

    def beat(self) -> None:
        beat = Heartbeat(node=self.name, session=self.session, active_work=self.jobs.active_work())
        receipt = self.say(lambda: self.world.deliver(beat, self.session))
        if receipt is not None:
            self.jobs.cancel(receipt.cancel)

    # -- training ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        job = self.jobs.next_to_train()
        if job is None:
            return
        if job.cancelled:
            self.jobs.finish(job)
            return
        assert all(other.client != job.client for other in self.training), "a client is trained by one at a time"
        before = list(range(1, job.round))
        assert self.completed[job.client] == before, f"{job.client} is at round {job.round} and has done {before}"
        settled = [q for q in before if q < job.round - self.overlap]
        assert all((job.client, q) in self.told for q in settled), "what its last update left unsaid is not known"
        self.training.append(job)

    def end(self, job: Job) -> None:
        self.training.remove(job)
        self.completed[job.client].append(job.round)
        self.disk[job.client, job.round] = False
        self.begun.pop((job.client, job.round), None)
        self.jobs.done(job, update(job.client, job.round))

    def fail(self, job: Job) -> None:
        self.failed.add(job.client)
        self.failures -= 1
        self.training.remove(job)
        self.begun.pop((job.client, job.round), None)
        failed = Failed(node="", session="", client=job.client, round=job.round, error="no room", retryable=True)
        self.jobs.done(job, failed)

    # -- reporting -----------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        if (job := self.jobs.next_to_report()) is not None:
            self.reporting.append(job)

    def send(self, job: Job) -> None:
        """Maybe once more, where the receipt has not come yet."""
        if isinstance(job.outcome, Failed):
            failed = replace(job.outcome, node=self.name, session=self.session)
            receipt = self.say(lambda: self.world.deliver(failed, self.session))
        else:
            sent = replace(update(job.client, job.round), session=self.session)
            receipt = self.say(lambda: self.world.validated(sent, f"{job.client} {job.round}"))
        if receipt is not None:
            self.receipts[job] = receipt

    def hear(self, job: Job) -> None:
        receipt = self.receipts.pop(job)
        if isinstance(job.outcome, Update):
            assert receipt.accepted, receipt
            self.told.add((job.client, job.round))
            self.disk[job.client, job.round] = True
            for one in [one for one, taken in self.disk.items() if taken and one[1] <= receipt.committed]:
                del self.disk[one]
        self.reporting.remove(job)
        self.jobs.finish(job)


def update(client: str, round: int) -> Update:
    return Update(node="", session="", client=client, round=round, manifest=MANIFEST, samples=1, tokens=1, steps=1, seconds=1.0)  # fmt: skip


SETTINGS = {
    "plain": Federation(clients=3, rounds=ROUNDS, local_steps=6, evaluate_every=0, waiting=PATIENT),
    "streamed": Federation(
        clients=3, rounds=ROUNDS, local_steps=6, evaluate_every=0, waiting=PATIENT, streaming=Streaming(fragments=2, overlap=1)
    ),
    "far": Federation(
        clients=3, rounds=ROUNDS, local_steps=6, evaluate_every=0, waiting=PATIENT, streaming=Streaming(fragments=3, overlap=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", sorted(SETTINGS))
@pytest.mark.parametrize("examples", [7, pytest.param(150, marks=pytest.mark.slow)])
def test_every_round_of_every_client_is_trained_once_and_in_its_order(which: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32), disturbances=st.integers(0, 300))
    def check(seed: int, disturbances: int) -> None:
        train_disturbed(which, seed, disturbances)

    check()


def train_disturbed(which: str, seed: int, disturbances: int) -> None:
    """Answers and receipts that are lost, failures that pass, silence, and kills of nodes and server, in any order."""
    chance = random.Random(seed)
    world = World(SETTINGS[which], 3).begin()
    sites = [Site(world, "two", ("0", "1"), 2, failures=2), Site(world, "one", ("2",), 1, failures=1)]

    def restart() -> None:
        world.restart([name for name in "012" if chance.random() < 0.3])
        for site in sites:  # their connections end
            site.ask = None

    for number in itertools.count():
        if world.ended is not None:
            break
        assert number < 20_000, world.coordinator.status(world.now)
        site = chance.choice(sites)
        acts = [*site.acts(), lambda: world.pass_(0.4)]
        if number < disturbances and chance.random() < 0.2:
            acts = [site.start, restart, lambda: world.pass_(3.0), site.beat]
        chance.choice(acts)()
    assert world.coordinator.state.ended == f"all {ROUNDS} rounds are done"
    for site in sites:
        assert site.completed == {client: list(range(1, ROUNDS + 1)) for client in site.clients}
    assert world.closed() == dict.fromkeys(range(1, ROUNDS + 1), ("0", "1", "2"))


def test_a_repeated_work_request_gets_a_new_answer() -> None:
    """The server was started again, and has lost an update that it had: its order is no old one."""
    jobs = JobQueue(1, threading.Event())

    def order() -> Job:
        given = Fit(run="run", client="0", round=1, steps=1, clock=0, base="b", weights=MANIFEST)
        return Job.of(given, cast("Any", None))

    first = jobs.next_request(0, ("0",), 8)
    assert first is not None
    jobs.active_work_for_request()
    job = order()
    assert jobs.add(job, first)
    jobs.finish(job)
    assert not jobs.add(order(), first), "it may have been on its way"
    jobs.active_work_for_request()
    assert jobs.add(order(), first)
