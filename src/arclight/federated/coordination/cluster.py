"""Track connected nodes, their assignments and timers: in memory only, never in the journal.

`coordinator` holds one `ClusterState`; the rules read it, and return bound methods of it as changes, which `Coordinator.apply` calls. After a
restart it is empty and fills up as nodes join again, so nothing that must survive belongs here. Queues keep the order in which work was
added, and timers of one time the order in which they were set: simulations repeat runs by that.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from arclight.federated.coordination.run_state import RunState
from arclight.federated.coordination.settings import Waiting
from arclight.federated.protocol import ActiveWork, Join, WorkRequest


class Assignment(NamedTuple):
    """One client's work: a round to fit, or weights to evaluate."""

    kind: Literal["fit", "evaluate"]
    round: int
    client: str


@dataclass(slots=True)
class Task:
    """An assignment that was given to a node."""

    work: Assignment
    seen: float
    """Time at which it was given, or last reported by the node."""
    steps: int = -1
    """Optimizer steps that the node reports; -1 before its first report, as the order may not have arrived."""


@dataclass(slots=True)
class NodeState:
    """A node that has joined, and everything that is asked of it."""

    name: str
    session: str
    process: str
    clients: tuple[str, ...]
    speed: float | None
    last_contact: float
    last_progress: float
    """Time of its last step, update or request."""
    lost: float | None = None
    """Time at which it was declared lost; None while it is here."""
    tasks: dict[Assignment, Task] = field(default_factory=dict)
    """Work that it was given and has not finished."""
    queue: dict[Assignment, None] = field(default_factory=dict)
    """Fits that wait to be given to it."""
    evaluations: dict[Assignment, None] = field(default_factory=dict)
    """Evaluations that wait to be given to it; they come before fits."""
    held_requests: dict[str, None] = field(default_factory=dict)
    """Its held work requests, by name."""
    cancelling: dict[Assignment, None] = field(default_factory=dict)
    """Work that the node is to stop, until it no longer reports it."""

    def of(self, client: str) -> list[Task]:
        """Return the tasks of one of this node's clients, oldest first."""
        return [task for work, task in self.tasks.items() if work.client == client]

    def unfinished(self) -> list[Assignment]:
        """Return the work that it began before it joined again, and must be given again."""
        return [work for work, task in self.tasks.items() if task.seen == -math.inf]


class DepartedClient(NamedTuple):
    """A client whose data left with its node, and the reason that the node gave."""

    at: float
    why: str


class Timer(NamedTuple):
    """Entry of the timer heap; ``number`` orders timers of the same time as they were armed."""

    at: float
    number: int
    kind: Literal[
        "silence", "stall", "lease", "ask", "home", "deadline", "grace", "settle", "join", "measure", "say"
    ]  # fmt: skip
    key: object


_REMEMBERED_NODES = 100_000
"""Most clients whose last node is remembered."""


class ClusterState:
    """Nodes by name and session, assignments, and timers; changed by `Coordinator.apply` alone."""

    def __init__(self, waiting: Waiting, state: RunState, ahead: int = 0) -> None:
        self._waiting, self._state, self._ahead = waiting, state, ahead
        self.nodes: dict[str, NodeState] = {}
        self.sessions: dict[str, NodeState] = {}
        """Nodes that are here, by session."""
        self.assignments: dict[Assignment, NodeState | None] = {}
        """All work that is to be done, and its node; None if no node that could do it is here."""
        self.unassigned: dict[Assignment, float] = {}
        """Work without a node, and until when one is waited for."""
        self.held_requests: dict[str, NodeState] = {}
        """Held work requests, by the name of the request."""
        self.ready: dict[str, NodeState] = {}
        """Nodes with a held request for which there is work."""
        self.attempts: dict[Assignment, int] = {}
        """Failed attempts of an assignment."""
        self.timers: list[Timer] = []
        self.passed: set[tuple[str, int, int]] = set()
        """Deadlines and graces that are over: (kind, round, attempt)."""
        self.deadlines: dict[int, float] = {}
        """Round to the time at which its newest attempt is late."""
        self.challengers: dict[str, tuple[str, float]] = {}
        """Node to a second process that wants to join under its name, and when it came."""
        self.aggregating: int | None = None
        self.evaluating_on_server: set[int] = set()
        self.rejoin_over = True
        """False for a moment after a restart of the server, in which nodes rejoin with what they have started."""
        self.started = False
        """True once enough nodes have joined for the first round."""
        self.empty_since: float | None = None
        """Time since which no node is here."""
        self._owners: dict[str, dict[str, None]] = {}
        self.departed: dict[str, DepartedClient] = {}
        """Clients whose data left with their node."""
        self.unclaimed: set[str] = set()
        """Clients for which no node has joined in time, and none since."""
        self._last_nodes: dict[str, str] = {}
        self._numbers = 0

    def arm(self, at: float, kind: str, key: object = None) -> None:
        """Set a timer."""
        self._numbers += 1
        heapq.heappush(self.timers, Timer(at, self._numbers, kind, key))  # type: ignore[arg-type]

    def pop_timer(self, next_at: float | None = None) -> None:
        """Remove the timer that is due first; arm it again for ``next_at``, if given."""
        timer = heapq.heappop(self.timers)
        if next_at is not None:
            self.arm(next_at, timer.kind, timer.key)

    def mark_started(self) -> None:
        """Record that enough nodes have joined for the first round."""
        self.started = True

    def mark_aggregating(self, round: int | None) -> None:
        """Record the round that is being aggregated, if any."""
        self.aggregating = round

    def mark_evaluating(self, round: int) -> None:
        """Record that the server evaluates a round."""
        self.evaluating_on_server.add(round)

    def mark_passed(self, what: str, round: int, attempt: int) -> None:
        """Record that a deadline or grace of a round's attempt is over."""
        self.passed.add((what, round, attempt))

    def set_deadline(self, round: int, attempt: int, at: float) -> None:
        """Set the time at which a round's attempt is late."""
        self.deadlines[round] = at
        self.arm(at, "deadline", (round, attempt))

    def begin_rejoin(self, now: float, *, started: bool) -> None:
        """Start the time to rejoin after a restart, before work of any node is balanced."""
        self.rejoin_over, self.started = False, started
        self.arm(now + self._waiting.silence_s, "settle")

    def end_rejoin(self, now: float) -> None:
        """Balance the work that no node has claimed after a restart."""
        self.rejoin_over = True
        self.rebalance(now)

    def challenge(self, node: str, process: str, now: float) -> None:
        """Record that a second process wants to join under the name of a present node."""
        self.challengers[node] = (process, now)

    def awaits_nodes(self, now: float) -> bool:
        """Return True if a node is silent for too long, or nodes have yet to rejoin."""
        silence_s = self._waiting.silence_s
        here = (node for node in self.sessions.values() if node.lost is None)
        return not self.rejoin_over or any(node.last_contact + silence_s <= now for node in here)

    def mark_empty(self, now: float) -> None:
        """Record that no node is present from now on."""
        self.empty_since = now
        self.arm(now + self._waiting.join_timeout_s, "join")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def join(self, message: Join, session: str, now: float) -> None:
        """Add a node, in place of its former connection; it continues what it has started."""
        former = self.nodes.get(message.node)
        if former is not None:
            self._part(former)
            self._disown(former, now, departed=bool(message.clients))
        node = NodeState(message.node, session, message.process, message.clients, message.steps_per_second, now, now)
        self.nodes[node.name], self.sessions[node.session] = node, node
        self.challengers.pop(node.name, None)
        self.empty_since = None
        for client in node.clients:
            self._owners.setdefault(client, {})[node.name] = None
            self.departed.pop(client, None)
            self.unclaimed.discard(client)
        if not node.clients:
            self.unclaimed.clear()
        self.arm(now + self._waiting.silence_s, "silence", node.session)
        self.arm(now + self._waiting.no_progress_timeout_s, "stall", node.session)
        for held in message.held:
            work = Assignment("fit", held.round, held.client)
            owners = self._owners.get(held.client, {node.name: None})
            if (node.clients and held.client not in node.clients) or node.name not in owners:
                continue  # another node's client: whoever has its data goes on with it
            if held.client not in self._state.assigned.get(held.round, {}):
                node.cancelling[work] = None
                continue
            holder = self.assignments.get(work)
            if holder is None or holder is former or holder.lost is not None or work in holder.queue:
                self._take(work)
                self.assignments[work] = node
                node.tasks[work] = Task(work, now if held.finished else -math.inf)
        mine = [work for work in self.unassigned if work.client in node.clients] if node.clients else []
        left = [] if former is None else [*former.evaluations, *former.queue, *former.tasks]
        self.assign([work for work in left if self.assignments.get(work) is former], now)
        self.assign(mine, now)
        if not node.clients:
            self.rebalance(now)

    def mark_lost(self, node: NodeState, now: float) -> None:
        """Take the queue from a silent node; started work stays its own until its lease ends."""
        self._part(node)
        node.lost = now
        waiting = [*node.evaluations, *node.queue]
        node.evaluations, node.queue, node.held_requests = {}, {}, {}
        self.arm(now + self._waiting.lease_s, "lease", node.session)
        self.assign(waiting, now)
        self._on_departure(node, now)

    def evict(self, node: NodeState, now: float, why: str = "") -> None:
        """Remove a node for good, and assign its work to others."""
        self._part(node)
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
        self._disown(node, now, departed=True, why=why)
        works = [*node.evaluations, *node.queue, *node.tasks]
        node.tasks, node.evaluations, node.queue = {}, {}, {}
        for work in works:
            if self.assignments.get(work) is node:
                self.assignments[work] = None
                if work.client in self.departed:
                    self.unassign(work, now)
                else:
                    self.assign([work], now)
        self._on_departure(node, now)

    def record_late_node(self, clients: Iterable[str], now: float) -> None:
        """Record that the node of some clients came after the end of the run."""
        for client in clients:
            self.departed.setdefault(client, DepartedClient(now, ""))

    def node_of(self, session: str) -> NodeState | None:
        """Return the node of a session, also if it counts as lost."""
        return next((node for node in self.nodes.values() if node.session == session), None)

    def record_contact(self, node: NodeState, now: float, *, progress: bool = True) -> None:
        """Record the arrival of a node's message, and if it shows progress."""
        node.last_contact = now
        if progress:
            node.last_progress = now

    def report_progress(self, node: NodeState, doing: Iterable[ActiveWork], now: float) -> None:
        """Record what a node reports of its work; reports are contact too."""
        moved, names = False, dict[Assignment, None]()
        for one in doing:
            work = Assignment(one.kind, one.round, one.client)
            names[work] = None
            if not self.is_current(one):
                continue
            if work in node.queue or work in node.evaluations:  # it was given once, and taken back meanwhile
                self._take(work)
                self.assignments[work], node.tasks[work] = node, Task(work, now)
            if (task := node.tasks.get(work)) is not None:
                steps = max(one.steps, 0)  # a negative count would mean that the order may not have arrived
                moved |= steps != task.steps
                task.seen, task.steps = now, steps
        for work in [work for work in node.cancelling if work not in names]:
            del node.cancelling[work]
        self.record_contact(node, now, progress=moved)
        self._touch(node)

    def is_away(self, work: Assignment) -> bool:
        """Return True if the client's node has left, or was waited for in vain."""
        return work.client not in self._owners and (work.client in self.departed or work.client in self.unclaimed)

    def has_joined(self, client: str) -> bool:
        """Return True if the one node with a client's data has been here since this process started."""
        return client in self._owners or client in self.departed

    def mark_unclaimed(self, client: str) -> None:
        """Record that no node came for a client.

        Later rounds with a quorum do not wait for it.
        """
        if client not in self._owners:
            self.unclaimed.add(client)

    def is_current(self, one: ActiveWork) -> bool:
        """Return True if reported work is for its round's newest attempt."""
        open = self._state.started_rounds.get(one.round) if one.kind == "fit" else None
        return open is None or open.discarded == one.attempt

    def _disown(self, node: NodeState, now: float, *, departed: bool, why: str = "") -> None:
        """Remove a node's clients from it.

        departed: their data left with it.
        """
        for client in node.clients:
            owners = self._owners.get(client, {})
            owners.pop(node.name, None)
            if not owners:
                self._owners.pop(client, None)
                if departed:
                    self.departed[client] = DepartedClient(now, why)

    def _part(self, node: NodeState) -> None:
        """End a node's session: its messages are refused and its held requests forgotten."""
        self.sessions.pop(node.session, None)
        for to in node.held_requests:
            self.held_requests.pop(to, None)
        node.held_requests = {}
        self.ready.pop(node.name, None)

    # -- work ----------------------------------------------------------------------------------------------------------

    def add(self, works: Iterable[Assignment], now: float) -> None:
        """Add new work and assign it."""
        fresh = [work for work in works if work not in self.assignments]
        self.assignments.update(dict.fromkeys(fresh))
        self.assign(fresh, now)

    def assign(self, works: Iterable[Assignment], now: float) -> None:
        """Queue work at the nodes of its clients, or balance it over nodes that take any client."""
        free = []
        for work in works:
            self._take(work)
            if self._ahead and (node := self._node_beside(work)) is not None:
                self._queue_at(work, node)
                continue
            owners = self._owners.get(work.client)
            if not owners:
                if work.client in self.departed:
                    self.unassign(work, now + self._waiting.lease_s)
                else:
                    free.append(work)
                continue
            node = next((self.nodes[name] for name in owners if self.nodes[name].lost is None), None)
            if node is not None:
                self._queue_at(work, node)
            else:
                self.unassign(work, max(self.nodes[name].lost or now for name in owners) + self._waiting.lease_s)
        self._balance(free, now)

    def rebalance(self, now: float) -> None:
        """Balance work that any node may do and none has started again: nodes have joined or left."""
        pool = [node for node in self.nodes.values() if node.lost is None and not node.clients]
        free = [work for node in pool for work in (*node.evaluations, *node.queue)]
        free += [w for w in self.unassigned if w.client not in self._owners and w.client not in self.departed]
        for work in free:
            self._take(work)
        self._balance(free, now)

    def _on_departure(self, node: NodeState, now: float) -> None:
        if not self.sessions and self.empty_since is None:
            self.mark_empty(now)
        if not node.clients:
            self.rebalance(now)

    def _balance(self, works: list[Assignment], now: float) -> None:
        """Balance by consistent hashing with bounded loads (Mirrokni et al. 2016).

        Each client goes to its last node if that is here and has room, or to the next one on a ring of hashes; none gets more
        than its share by speed, rounded up.
        """
        if not works:
            return
        pool = sorted(
            (node for node in self.nodes.values() if node.lost is None and not node.clients),
            key=lambda node: _point(node.name),
        )
        if not pool or not self.rejoin_over:
            for work in works:
                self.unassign(work, now + self._waiting.join_timeout_s)
            return
        known = [node.speed for node in pool if node.speed]
        usual = sum(known) / len(known) if known else 1.0
        speeds = [node.speed or usual for node in pool]
        loads = {node.name: len(node.tasks) + len(node.queue) + len(node.evaluations) for node in pool}
        total = len(works) + sum(loads.values())
        caps = {node.name: math.ceil(total * s / sum(speeds) - 1e-9) for node, s in zip(pool, speeds, strict=True)}
        points, by_name = [_point(node.name) for node in pool], {node.name: node for node in pool}
        homes = [by_name.get(self._last_nodes.get(work.client, "")) for work in works]
        elsewhere = []
        for work, home in zip(works, homes, strict=True):
            if home is not None and loads[home.name] < caps[home.name]:
                loads[home.name] += 1
                self._queue_at(work, home)
            else:
                elsewhere.append(work)
        for work in elsewhere:
            start = bisect_left(points, _point(work.client))
            ring = (pool[(start + n) % len(pool)] for n in range(len(pool)))
            node = next(node for node in ring if loads[node.name] < caps[node.name])
            loads[node.name] += 1
            self._queue_at(work, node)

    def start(self, to: str, work: Assignment, now: float) -> None:
        """Record that a held or new request was answered with this work."""
        node = self.held_requests[to]
        self.release_request(to)
        self._take(work)
        self.assignments[work] = node
        if not node.tasks:
            node.last_progress = now  # it had nothing to progress in
        node.tasks[work] = Task(work, now)
        if not node.clients:
            self._last_nodes.pop(work.client, None)
            self._last_nodes[work.client] = node.name
            if len(self._last_nodes) > _REMEMBERED_NODES:
                del self._last_nodes[next(iter(self._last_nodes))]
        self._touch(node)

    def finish(self, work: Assignment, by: NodeState | None = None) -> None:
        """Remove finished, failed or cancelled work; all nodes but ``by`` are asked to cancel it."""
        node = self._take(work)
        self.assignments.pop(work, None)
        self.attempts.pop(work, None)
        if node is not None:
            if node is not by and node.lost is None:
                node.cancelling[work] = None
            self._touch(node)
        if by is not None:
            by.cancelling.pop(work, None)
            self._touch(by)
        for other in self._rounds_of(work.client) if self._ahead else ():  # it may have waited for this round
            if (node := self.assignments.get(other)) is not None:
                self._touch(node)

    def retry(self, work: Assignment, now: float, *, keep: bool) -> None:
        """Assign failed work again, followed by the client's later rounds.

        keep: its node only sends the result once more.
        """
        self.attempts[work] = self.attempts.get(work, 0) + 1
        if not keep:
            node = self.assignments.get(work)
            later = [task.work for task in node.of(work.client) if task.work.round > work.round] if node else []
            self.assign([work, *(other for other in later if other.kind == "fit")], now)

    def reassign_started(self, round: int, now: float) -> None:
        """Assign started work of a round again: its attempt was discarded."""
        started = (work for work, node in self.assignments.items() if node is not None and work in node.tasks)
        self.assign([work for work in started if work.kind == "fit" and work.round == round], now)

    def prune(self, now: float) -> None:
        """Remove work and deadlines that the run's state no longer asks for."""
        state = self._state
        for work in list(self.assignments):
            if work.kind == "fit":
                wanted = work.client in state.assigned.get(work.round, ())
            else:
                wanted = work.round in state.measuring and work.client in state.measuring[work.round].waiting
            if not wanted or state.ended is not None:
                self.finish(work)
        newest = state.committed
        self.passed = {what for what in self.passed if what[1] >= newest}
        self.evaluating_on_server = {round for round in self.evaluating_on_server if round in state.measuring}
        self.deadlines = {round: at for round, at in self.deadlines.items() if round in state.started_rounds}

    def hold_request(self, to: str, node: NodeState, message: WorkRequest, now: float) -> None:
        """Record a work request, which may be held for ``message.hold_s`` seconds."""
        self.report_progress(node, message.active_work, now)
        self.record_contact(node, now, progress=not node.tasks)
        node.held_requests[to] = None
        self.held_requests[to] = node
        self.arm(now + message.hold_s, "ask", to)
        self._touch(node)

    def release_request(self, to: str) -> None:
        """Remove a held request that was answered."""
        node = self.held_requests.pop(to, None)
        if node is not None:
            node.held_requests.pop(to, None)
            self._touch(node)

    def _queue_at(self, work: Assignment, node: NodeState) -> None:
        self.assignments[work] = node
        (node.queue if work.kind == "fit" else node.evaluations)[work] = None
        self._touch(node)

    def unassign(self, work: Assignment, until: float) -> None:
        """Record that no node can do this work, and wait for one until ``until``."""
        self.assignments[work] = None
        self.unassigned[work] = until
        self.arm(until, "home", work)

    def _take(self, work: Assignment) -> NodeState | None:
        """Remove work from all queues; return the node that had started it."""
        self.unassigned.pop(work, None)
        node = self.assignments.get(work)
        if node is None:
            return None
        node.queue.pop(work, None)
        node.evaluations.pop(work, None)
        if node.tasks.pop(work, None) is not None:
            return node
        self._touch(node)
        return None

    # -- next assignments ----------------------------------------------------------------------------------------------

    def next_assignment(self, node: NodeState, having: Collection[Assignment] = ()) -> Assignment | None:
        """Return the next work of a free worker of a node, or None.

        having: work that the node has just reported.
        """
        for waiting in (node.evaluations, node.unfinished(), node.queue):
            for work in waiting:
                busy = work in having or (not self._ahead and any(task.work != work for task in node.of(work.client)))
                if not busy and self.is_in_order(work, node, having):
                    return work
        return None

    def is_in_order(self, work: Assignment, node: NodeState, having: Collection[Assignment] = ()) -> bool:
        """Return True if the client's earlier rounds are done, or known to be at this node."""
        if any(one.client == work.client for one in node.cancelling):
            return False
        if work.kind == "evaluate" or not self._ahead:
            return True
        return all(
            other in having or (other in node.tasks and node.tasks[other].steps >= 0)
            for other in self._rounds_of(work.client)
            if other.round < work.round
        )

    def _rounds_of(self, client: str) -> list[Assignment]:
        """Return the rounds that a client is asked for at the same time."""
        return [Assignment("fit", round, client) for round, them in self._state.assigned.items() if client in them]

    def _node_beside(self, work: Assignment) -> NodeState | None:
        """Return the node that has another round of the client, and so its state."""
        found = (self.assignments.get(other) for other in self._rounds_of(work.client) if other != work)
        return next((n for n in found if n is not None and n.lost is None and self.nodes.get(n.name) is n), None)

    def _touch(self, node: NodeState) -> None:
        if node.held_requests and node.lost is None and self.next_assignment(node) is not None:
            self.ready[node.name] = node
        else:
            self.ready.pop(node.name, None)


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
