"""Simulate clients and network links as discrete events around the coordinator of real runs.

`simulate.simulate`, public as ``arclight.federated.simulate``, runs it. It drives the real `coordinator` by the contract in `events`, so that
rules cannot differ; only times, sizes and failures of nodes are models. The same seed must give the same result: events of one time happen in
the order in which they were queued.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.cluster import Timer
from arclight.federated.coordination.coordinator import Coordinator, run_to_quiescence
from arclight.federated.coordination.events import Command, EvaluatePlan, Event, FitPlan
from arclight.federated.coordination.records import Record, RoundClosed, RoundOpened
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import (
    Close,
    Evaluated,
    Failed,
    Heartbeat,
    Join,
    Leave,
    Manifest,
    Receipt,
    Update,
    Wait,
    WorkRequest,
)
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Cores, Device, Fleet, FleetSampler, Pipe, SimulatedJob
from arclight.federated.simulation.result import SimulationRecorder, SimulationResult
from arclight.federated.simulation.sizes import Sizes

_HOLD_S = math.inf  # work requests are held until there is an answer: a simulated connection never breaks


class Simulator:
    """Simulate one run. Time begins at 0 with a server that has its first weights, and no nodes."""

    def __init__(self, federation: Federation, sizes: Sizes, fleet: Fleet, seed: int) -> None:
        self.federation, self.sizes, self.fleet = federation, sizes, fleet
        waiting = federation.waiting
        self._heartbeat_s = waiting.heartbeat_interval_s
        """Simulated seconds between heartbeats. If no client falls silent, as many as show progress in time are enough: all
        others would only be answered, at a cost that grows with the connected clients and not with those of a round."""
        if not fleet.vanish:
            self._heartbeat_s = max(self._heartbeat_s, waiting.no_progress_timeout_s / 4)
        watched = replace(federation, waiting=replace(waiting, heartbeat_interval_s=self._heartbeat_s))
        self.coordinator = Coordinator(watched, federation.clients, seed, "simulation")
        self.now, self.events = 0.0, 0
        self._sampler = FleetSampler(fleet, seed)
        self._event_queue: list[tuple[float, int, Callable[[], None]]] = []
        """Heap of (second, number, what happens then)."""
        self._numbers = itertools.count()
        self._devices: dict[str, Device] = {}
        self._sessions: dict[str, Device] = {}
        self._held_requests: dict[str, Device] = {}
        """Work requests that the server holds, by the key of their answer."""
        self._remembered: dict[str, int] = {}
        """The weights that clients which have left still have."""
        costs = fleet.costs
        self._down, self._up = Pipe(costs.rate), Pipe(costs.rate)
        self._checks, self._folds = Cores(costs.threads), Cores(1)
        self._all_connected = federation.clients <= fleet.connected
        """Whether all clients stay connected; else one connects when it is sampled."""
        self._overlap = federation.overlap
        """Rounds that a client may fetch before it has reported the one it trains."""
        self._ended: ev.RunOver | None = None
        self._answer: Any = None
        self._last_heartbeat = -math.inf
        self._recorder = SimulationRecorder()

    def run(self) -> SimulationResult:
        """Run to the end. Raises FederatedError for a run that comes to a halt."""
        first = range(self.federation.clients) if self._all_connected else self.coordinator.sampler.draw(1)
        for client in first:
            self._at(self.fleet.links.latency_s, lambda name=str(client): self._connect(name))  # type: ignore[misc]
        self._handle(ev.RunStarted(base="0", checkpoint="0"))
        while self._ended is None:
            due = self.coordinator.next_deadline()
            due = math.inf if due is None else due
            coming = self._event_queue[0][0] if self._event_queue else math.inf
            if min(coming, due) == math.inf:
                raise FederatedError(f"the simulation has come to a halt: {self.coordinator.status(self.now)}")
            if self._beat_in_time(min(coming, due)):
                continue
            if due <= coming:
                self.now = max(self.now, due)
                self._handle(ev.Tick())
            else:
                self.now, _, act = heapq.heappop(self._event_queue)
                act()
        return self._recorder.result(
            seconds=self.now, check_seconds=self._checks.busy, fold_seconds=self._folds.busy, events=self.events,
            ended=self._ended.why, failed=self._ended.failed, model_bytes=self.sizes.model, update_bytes=self.sizes.up(None),
            weights_bytes=self.sizes.whole, clients=self.federation.clients,
        )  # fmt: skip

    # -- the server --------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self.events += 1
        waiting = [event]
        while waiting:
            for records, commands in run_to_quiescence(self.coordinator, _forget, waiting.pop(0), self.now):
                for record in records:
                    self._note(record)
                for command in commands:
                    if isinstance(command, ev.EvaluateOnServer):
                        waiting.append(ev.ServerEvaluated(round=command.round))
                    else:
                        self._carry_out(command)

    def _note(self, record: Record) -> None:
        self._recorder.note(record, self.now)
        if isinstance(record, RoundOpened):
            for client in record.clients:
                if client not in self._devices or self._devices[client].gone:
                    self._at(self.now + self.fleet.links.latency_s, lambda name=client: self._connect(name))  # type: ignore[misc]
        elif isinstance(record, RoundClosed) and not self.federation.buffered:
            taken = set(record.clients)
            for name in self._recorder.asked(record.round):
                device = self._devices.get(name)
                if name not in taken and device is not None and record.round in device.jobs:
                    beat = self.now + self.federation.waiting.heartbeat_interval_s / 2
                    self._at(beat, lambda device=device: self._beat(device))  # type: ignore[misc]

    def _carry_out(self, command: Command) -> None:
        match command:
            case ev.Answer(to=to, plan=plan) if to in self._held_requests:
                device = self._held_requests.pop(to)
                device.asking = False
                if not device.gone:
                    self._at(self.now + self.fleet.links.latency_s, lambda: self._answered(device, plan))
            case ev.Answer(to=to, plan=plan):
                self._answer = plan
            case ev.Aggregate():
                costs = self.fleet.costs
                took = (
                    costs.round_s
                    + costs.step * self.sizes.model
                    + costs.fold * self.sizes.part(command.fragment) * len(command.updates)
                )
                done = ev.RoundStored(
                    round=command.round, base=str(command.round), checkpoint=str(command.round), norm=1.0
                )  # fmt: skip
                self._at(self._folds.work(self.now, took), lambda: self._handle(done))
            case ev.RunOver():
                self._ended = command
            case ev.NodeLost() | ev.LogMessage():
                self._recorder.note_command(command)

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._event_queue, (time, next(self._numbers), act))

    # -- clients -----------------------------------------------------------------------------------------------------------

    def _send(self, message: Join | Heartbeat | Evaluated | Failed | Leave, session: str) -> Any:
        """Return the answer to a message that is answered at once."""
        return self._answer_to(ev.NodeMessage(to=self._request(), message=message, session=session))

    def _request(self) -> str:
        return f"message {next(self._numbers)}"

    def _answer_to(self, event: ev.NodeMessage) -> Any:
        self._answer = None
        self._handle(event)
        return self._answer

    def _connect(self, name: str) -> None:
        device = self._devices.get(name)
        if device is None or device.gone:
            device = self._sampler.device(self._index(name), name)
            device.has = self._remembered.pop(name, -1)
            self._devices[name] = device
        elif device.session:
            return
        device.session = f"session {next(self._numbers)}"
        join = Join(node=name, process=device.session, clients=(name,), steps_per_second=1 / device.step_s)
        plan = self._send(join, device.session)
        if isinstance(plan, ev.SessionGranted):
            self._sessions[device.session] = device
            self._ask(device)
        else:
            device.session = ""
            if isinstance(plan, Wait):
                self._at(self.now + plan.retry_after_s, lambda: self._connect(name))

    def _index(self, name: str) -> int:
        return int(name)

    def _ask(self, device: Device) -> None:
        """Request work as nodes do: one request at a time, up to the client's rounds in flight."""
        if not device.asking and not device.gone and len(device.jobs) <= self._overlap:
            to = f"ask {next(self._numbers)}"
            self._held_requests[to] = device
            device.asking = True
            ask = WorkRequest(
                node=device.name, session=device.session, hold_s=_HOLD_S, active_work=device.active_work()
            )
            self._handle(ev.NodeMessage(to=to, message=ask, session=device.session))

    def _answered(self, device: Device, plan: Any) -> None:
        match plan:
            case FitPlan():
                self._fetch(device, plan)
            case EvaluatePlan():
                self._evaluate(device, plan)
            case Receipt(reason="session"):
                self._sessions.pop(device.session, None)
                device.session = ""
                self._connect(device.name)
            case Wait():
                self._at(self.now + plan.retry_after_s, lambda: self._ask(device))
            case Close():
                device.gone = True

    def _fetch(self, device: Device, plan: FitPlan) -> None:
        if device.gone or plan.round in device.jobs:
            return
        base = int(plan.base)
        bytes = self.sizes.down(device.has, base)
        device.has = base
        job = device.jobs[plan.round] = SimulatedJob(plan, bytes)
        self._recorder.down(plan.round, bytes)
        there = self._down.send(self.now, bytes, device.down) + self.fleet.links.latency_s
        dies, fails = self._sampler.fate(self._index(device.name), plan.round)
        seconds = self._sampler.fit_seconds(device, self._index(device.name), plan)
        job.started_at = max(there, device.worker)
        job.ended_at = device.worker = job.started_at + seconds
        if dies is not None:
            self._at(self.now + dies * (job.ended_at - self.now), lambda: self._vanish(device))
        self._at(job.ended_at, lambda: self._fitted(device, job, fails))
        if self._overlap:
            self._at(there, lambda: self._ask(device))

    def _evaluate(self, device: Device, plan: EvaluatePlan) -> None:
        bytes = self.sizes.down(device.has, int(plan.base))
        device.has = int(plan.base)
        self._recorder.down(plan.round, bytes)
        there = self._down.send(self.now, bytes, device.down) + self.fleet.links.latency_s
        device.worker = max(there, device.worker) + self.fleet.speeds.evaluation_s

        def done() -> None:
            if not device.gone:
                who = {"node": device.name, "session": device.session, "client": device.name}
                self._send(Evaluated(**who, round=plan.round, samples=1, metrics={"loss": 0.0}), device.session)
                self._ask(device)

        self._at(device.worker + self.fleet.links.latency_s, done)

    def _vanish(self, device: Device) -> None:
        device.gone = True
        self._sessions.pop(device.session, None)

    def _fitted(self, device: Device, job: SimulatedJob, fails: bool) -> None:
        if device.gone or job.cancelled:
            return
        latency = self.fleet.links.latency_s
        if fails:
            self._at(self.now + latency, lambda: self._failed(device, job))
            return
        bytes = self.sizes.up(job.plan.fragment)
        begin = max(self.now, device.line)
        device.line = begin + 8 * bytes / device.up
        there = max(self._up.send(begin, bytes, device.up), device.line) + latency
        self._recorder.up(job.plan.round, bytes)

        def arrived() -> None:
            if not device.gone:
                seconds = self.fleet.costs.check * bytes
                self._at(self._checks.work(self.now, seconds), lambda: self._delivered(device, job, bytes))

        self._at(there, arrived)

    def _failed(self, device: Device, job: SimulatedJob) -> None:
        if not device.gone:
            device.jobs.pop(job.plan.round, None)
            failed = Failed(
                node=device.name, session=device.session, client=device.name, round=job.plan.round, error="it could not"
            )
            self._send(failed, device.session)
            self._free(device)

    def _delivered(self, device: Device, job: SimulatedJob, bytes: int) -> None:
        if device.gone or job.cancelled:
            return
        device.jobs.pop(job.plan.round, None)
        seconds = job.ended_at - job.started_at
        update = Update(
            node=device.name, session=device.session, client=device.name, round=job.plan.round, samples=1, tokens=0,
            manifest=Manifest(kind="update", tensors={}, blobs={"": bytes}), steps=job.plan.steps, seconds=seconds,
        )  # fmt: skip
        receipt = self._answer_to(
            ev.UpdateValidated(
                to=self._request(), message=update, session=device.session, digest=str(job.plan.round), norm=1.0
            )
        )
        if isinstance(receipt, Receipt) and not receipt.accepted:
            self._recorder.late(job.plan.round, device.name)
        self._at(self.now + self.fleet.links.latency_s, lambda: self._free(device))

    def _free(self, device: Device) -> None:
        """Request more work once the server has a result.

        In large fleets the device leaves until it is drawn again.
        """
        if device.gone:
            return
        if self._all_connected or device.jobs:
            self._ask(device)
            return
        self._send(Leave(node=device.name, session=device.session), device.session)
        self._sessions.pop(device.session, None)
        self._remembered[device.name] = device.has
        del self._devices[device.name]

    def _beat(self, device: Device) -> None:
        """Send a node's heartbeat.

        Only those that change anything are simulated, not one every `Waiting.heartbeat_interval_s`.
        """
        if device.gone or device.session not in self._sessions:
            return
        device.beats += 1
        beat = Heartbeat(node=device.name, session=device.session, active_work=device.active_work())
        receipt = self._send(beat, device.session)
        if isinstance(receipt, Receipt) and receipt.cancel:
            for one in receipt.cancel:
                device.jobs.pop(one.round).cancelled = True
                self._recorder.late(one.round, device.name)
            device.worker = max([self.now, *(job.ended_at for job in device.jobs.values())])
            self._beat(device)
            self._free(device)

    def _beat_in_time(self, following: float) -> bool:
        """Send heartbeats of living nodes before they count as silent.

        ``following``: when the next thing happens.
        """
        every = self._heartbeat_s
        if following <= self._last_heartbeat + every:
            return False
        self.now = max(self.now, following - every)
        self._last_heartbeat = self.now
        for timer in _due(self.coordinator.cluster.timers, following + 2 * every):
            device = self._sessions.get(str(timer.key)) if timer.kind in ("silence", "stall") else None
            if device is not None:
                self._beat(device)
        return True


def _due(timers: Sequence[Timer], now: float) -> list[Timer]:
    """Return the timers of a heap that are due, without looking at the others."""
    found, look = [], [0]
    while look:
        at = look.pop()
        if at < len(timers) and timers[at].at <= now:
            found.append(timers[at])
            look += [2 * at + 1, 2 * at + 2]
    return found


def _forget(_: Sequence[Record]) -> None:
    """Drop records: a simulated run leaves no journal."""
