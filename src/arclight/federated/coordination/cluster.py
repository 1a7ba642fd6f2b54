"""Nodes, their work, and what changes about them without being kept."""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from arclight.federated.coordination.events import Joined, Note
from arclight.federated.coordination.run_state import RunState
from arclight.federated.coordination.settings import Waiting
from arclight.federated.protocol import Doing


class Assignment(NamedTuple):
    """Something that one client is to do."""

    kind: Literal["fit", "evaluate"]
    round: int
    client: str


@dataclass(slots=True)
class Task:
    """Work that a node has."""

    work: Assignment
    seen: float
    """When it was given, or last named by the node."""
    steps: int = -1
    """Done, as the node says; -1: it has not named this yet, so that nobody knows whether it has the order."""


@dataclass(slots=True)
class Node:
    name: str
    session: str
    process: str
    clients: tuple[str, ...]
    speed: float | None
    heard: float
    progress: float
    """When it last did something: a step, an update, a question."""
    lost: float | None = None
    tasks: dict[Assignment, Task] = field(default_factory=dict)
    queue: dict[Assignment, None] = field(default_factory=dict)
    measures: dict[Assignment, None] = field(default_factory=dict)
    asks: dict[str, None] = field(default_factory=dict)
    stopping: dict[Assignment, None] = field(default_factory=dict)
    """Work that is not wanted any more, until the node does not name it."""

    def of(self, client: str) -> list[Task]:
        """What a client of this node is at, oldest first."""
        return [task for work, task in self.tasks.items() if work.client == client]


class Departed(NamedTuple):
    """A client's data went with its node."""

    at: float
    why: str
    """What the node has said of that."""


class Timer(NamedTuple):
    at: float
    number: int
    kind: Literal[
        "silence", "stall", "lease", "ask", "home", "deadline", "grace", "settle", "join", "measure", "say"
    ]  # fmt: skip
    key: object


@dataclass(frozen=True, kw_only=True)
class TimerFired(Note):
    """The first timer was heard; ``again``: when it is to ring next."""

    again: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeEvicted(Note):
    """A lost node was waited for long enough."""

    node: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSkipped(Note):
    """Nobody measures this any more."""

    work: Assignment


@dataclass(frozen=True, kw_only=True)
class Unassigned(Note):
    """Nobody is here for this; somebody may come until then."""

    work: Assignment
    until: float


@dataclass(frozen=True, kw_only=True)
class Retry(Note):
    """Work has failed in a way that may pass: it is given anew, or the node that has it sends its result once more."""

    work: Assignment
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed(Note):
    """A round's deadline or grace has passed, or nodes have had their time to come back."""

    what: tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class DuplicateJoin(Note):
    """A second process has offered itself under the name of a node that is here."""

    node: str
    process: str


_HOMES = 100_000  # clients whose last node is remembered


class ClusterState:
    """Nodes, their work, and alarms. Changed by `Coordinator.apply` only."""

    def __init__(self, waiting: Waiting, lasting: RunState, ahead: int = 0) -> None:
        self._waiting, self._lasting, self._ahead = waiting, lasting, ahead
        self.nodes: dict[str, Node] = {}
        self.sessions: dict[str, Node] = {}
        """Of nodes that are here."""
        self.where: dict[Assignment, Node | None] = {}
        """All work that is to be done, and whose it is; None: whoever could do it is not here."""
        self.homeless: dict[Assignment, float] = {}
        self.asks: dict[str, Node] = {}
        self.ready: dict[str, Node] = {}
        """Nodes that ask and for which there is work."""
        self.tries: dict[Assignment, int] = {}
        self.timers: list[Timer] = []
        self.over: set[tuple[str, int, int]] = set()
        self.deadlines: dict[int, float] = {}
        self.challengers: dict[str, tuple[str, float]] = {}
        self.folding: int | None = None
        self.measured: set[int] = set()
        self.settled = True
        self.started = False
        """Whether enough nodes have come for the first round."""
        self.alone_since: float | None = None
        self._owners: dict[str, dict[str, None]] = {}
        self.departed: dict[str, Departed] = {}
        """Clients whose data went with their node."""
        self.unclaimed: set[str] = set()
        """Clients for which no node came in time, and none has since."""
        self._homes: dict[str, str] = {}
        self._numbers = 0

    def arm(self, at: float, kind: str, key: object = None) -> None:
        self._numbers += 1
        heapq.heappush(self.timers, Timer(at, self._numbers, kind, key))  # type: ignore[arg-type]

    def ring(self, again: float | None) -> None:
        """The timer that is due first was heard; it may ring again."""
        timer = heapq.heappop(self.timers)
        if again is not None:
            self.arm(again, timer.kind, timer.key)

    def alone(self, now: float) -> None:
        """From now on nobody is here."""
        self.alone_since = now
        self.arm(now + self._waiting.join, "join")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def join(self, event: Joined, now: float) -> None:
        former = self.nodes.get(event.node)
        if former is not None:
            self._part(former)
            self._disown(former, now, departed=bool(event.clients))
        node = Node(event.node, event.session, event.process, event.clients, event.steps_per_second, now, now)
        self.nodes[node.name], self.sessions[node.session] = node, node
        self.challengers.pop(node.name, None)
        self.alone_since = None
        for client in node.clients:
            self._owners.setdefault(client, {})[node.name] = None
            self.departed.pop(client, None)
            self.unclaimed.discard(client)
        if not node.clients:
            self.unclaimed.clear()
        self.arm(now + self._waiting.silence, "silence", node.session)
        self.arm(now + self._waiting.stall, "stall", node.session)
        for held in event.held:
            work = Assignment("fit", held.round, held.client)
            owners = self._owners.get(held.client, {node.name: None})
            if (node.clients and held.client not in node.clients) or node.name not in owners:
                continue  # another node's client: whoever has its data goes on with it
            if held.client not in self._lasting.outstanding.get(held.round, {}):
                node.stopping[work] = None
                continue
            holder = self.where.get(work)
            if holder is None or holder is former or holder.lost is not None or work in holder.queue:
                self._take(work)
                self.where[work] = node
                node.tasks[work] = Task(work, now if held.finished else -math.inf)
        mine = [work for work in self.homeless if work.client in node.clients] if node.clients else []
        left = [] if former is None else [*former.measures, *former.queue, *former.tasks]
        self.place([work for work in left if self.where.get(work) is former], now)
        self.place(mine, now)
        if not node.clients:
            self.deal(now)

    def lose(self, node: Node, now: float) -> None:
        """A node was silent: what it has begun is kept for it, the rest may go elsewhere."""
        self._part(node)
        node.lost = now
        waiting = [*node.measures, *node.queue]
        node.measures, node.queue, node.asks = {}, {}, {}
        self.arm(now + self._waiting.lease, "lease", node.session)
        self.place(waiting, now)
        self._gone(node, now)

    def drop(self, node: Node, now: float, why: str = "") -> None:
        """A node is gone for good, with what it has begun."""
        self._part(node)
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
        self._disown(node, now, departed=True, why=why)
        works = [*node.measures, *node.queue, *node.tasks]
        node.tasks, node.measures, node.queue = {}, {}, {}
        for work in works:
            if self.where.get(work) is node:
                self.where[work] = None
                if work.client in self.departed:
                    self.strand(work, now)
                else:
                    self.place([work], now)
        self._gone(node, now)

    def that_leaves(self, session: str) -> Node | None:
        """Return the node of a session, also one that has been silent for so long that it counts as lost."""
        return next((node for node in self.nodes.values() if node.session == session), None)

    def heard(self, node: Node, now: float, *, progress: bool) -> None:
        node.heard = now
        if progress:
            node.progress = now

    def named(self, node: Node, doing: Iterable[Doing], now: float) -> None:
        """What a node says that it does."""
        moved, names = False, dict[Assignment, None]()
        for one in doing:
            work = Assignment(one.kind, one.round, one.client)
            names[work] = None
            if not self.is_current(one):
                continue
            if work in node.queue or work in node.measures:  # it was given once, and taken back meanwhile
                self._take(work)
                self.where[work], node.tasks[work] = node, Task(work, now)
            if (task := node.tasks.get(work)) is not None:
                steps = max(one.steps, 0)  # less than none would say that nobody knows whether it has the order
                moved |= steps != task.steps
                task.seen, task.steps = now, steps
        for work in [work for work in node.stopping if work not in names]:
            del node.stopping[work]
        self.heard(node, now, progress=moved)
        self._touch(node)

    def is_away(self, work: Assignment) -> bool:
        """Return True if the client's node was waited for in vain, or has left."""
        return work.client not in self._owners and (work.client in self.departed or work.client in self.unclaimed)

    def has_come(self, client: str) -> bool:
        """Return True if a node that alone has a client's data has been here since this process began."""
        return client in self._owners or client in self.departed

    def given_up(self, client: str) -> None:
        """Nobody came for a client: later rounds do not wait for it if they have a quorum."""
        if client not in self._owners:
            self.unclaimed.add(client)

    def is_current(self, one: Doing) -> bool:
        """Return True if what a node names is for its round's newest attempt."""
        open = self._lasting.begun.get(one.round) if one.kind == "fit" else None
        return open is None or open.discarded == one.attempt

    def _disown(self, node: Node, now: float, *, departed: bool, why: str = "") -> None:
        """A node's clients are not its any more; ``departed``: their data went with it."""
        for client in node.clients:
            owners = self._owners.get(client, {})
            owners.pop(node.name, None)
            if not owners:
                self._owners.pop(client, None)
                if departed:
                    self.departed[client] = Departed(now, why)

    def _part(self, node: Node) -> None:
        """No message of this session counts any more."""
        self.sessions.pop(node.session, None)
        for to in node.asks:
            self.asks.pop(to, None)
        node.asks = {}
        self.ready.pop(node.name, None)

    # -- work ----------------------------------------------------------------------------------------------------------

    def add(self, works: Iterable[Assignment], now: float) -> None:
        """More is to be done."""
        fresh = [work for work in works if work not in self.where]
        self.where.update(dict.fromkeys(fresh))
        self.place(fresh, now)

    def place(self, works: Iterable[Assignment], now: float) -> None:
        """Give work to the nodes of its clients, or deal it out to those that take any."""
        free = []
        for work in works:
            self._take(work)
            if self._ahead and (node := self._beside(work)) is not None:
                self._give(work, node)
                continue
            owners = self._owners.get(work.client)
            if not owners:
                if work.client in self.departed:
                    self.strand(work, now + self._waiting.lease)
                else:
                    free.append(work)
                continue
            node = next((self.nodes[name] for name in owners if self.nodes[name].lost is None), None)
            if node is not None:
                self._give(work, node)
            else:
                self.strand(work, max(self.nodes[name].lost or now for name in owners) + self._waiting.lease)
        self._deal(free, now)

    def deal(self, now: float) -> None:
        """Deal anew what anyone may do and nobody has begun: nodes have come or gone."""
        pool = [node for node in self.nodes.values() if node.lost is None and not node.clients]
        free = [work for node in pool for work in (*node.measures, *node.queue)]
        free += [w for w in self.homeless if w.client not in self._owners and w.client not in self.departed]
        for work in free:
            self._take(work)
        self._deal(free, now)

    def _gone(self, node: Node, now: float) -> None:
        if not self.sessions and self.alone_since is None:
            self.alone(now)
        if not node.clients:
            self.deal(now)

    def _deal(self, works: list[Assignment], now: float) -> None:
        """Consistent hashing with bounded loads (Mirrokni et al. 2016): each client to its last node if that is here and has
        room, or to the next one on a ring of hashes; none gets more than its share by speed, rounded up.
        """
        pool = sorted(
            (node for node in self.nodes.values() if node.lost is None and not node.clients),
            key=lambda node: _point(node.name),
        )
        if not works:
            return
        if not pool or not self.settled:
            for work in works:
                self.strand(work, now + self._waiting.join)
            return
        known = [node.speed for node in pool if node.speed]
        usual = sum(known) / len(known) if known else 1.0
        speeds = [node.speed or usual for node in pool]
        loads = {node.name: len(node.tasks) + len(node.queue) + len(node.measures) for node in pool}
        total = len(works) + sum(loads.values())
        caps = {node.name: math.ceil(total * s / sum(speeds) - 1e-9) for node, s in zip(pool, speeds, strict=True)}
        points, by_name = [_point(node.name) for node in pool], {node.name: node for node in pool}
        homes = [by_name.get(self._homes.get(work.client, "")) for work in works]
        elsewhere = []
        for work, home in zip(works, homes, strict=True):
            if home is not None and loads[home.name] < caps[home.name]:
                loads[home.name] += 1
                self._give(work, home)
            else:
                elsewhere.append(work)
        for work in elsewhere:
            start = bisect_left(points, _point(work.client))
            ring = (pool[(start + n) % len(pool)] for n in range(len(pool)))
            node = next(node for node in ring if loads[node.name] < caps[node.name])
            loads[node.name] += 1
            self._give(work, node)

    def begin(self, to: str, work: Assignment, now: float) -> None:
        """A node's question was answered with work."""
        node = self.asks[to]
        self.answered(to)
        self._take(work)
        self.where[work] = node
        node.tasks[work] = Task(work, now)
        if not node.clients:
            self._homes.pop(work.client, None)
            self._homes[work.client] = node.name
            if len(self._homes) > _HOMES:
                del self._homes[next(iter(self._homes))]
        self._touch(node)

    def finish(self, work: Assignment, by: Node | None = None) -> None:
        """Work is done, failed or not wanted any more; a node other than ``by`` that is at it is to stop."""
        node = self._take(work)
        self.where.pop(work, None)
        self.tries.pop(work, None)
        if node is not None:
            if node is not by and node.lost is None:
                node.stopping[work] = None
            self._touch(node)
        if by is not None:
            by.stopping.pop(work, None)
            self._touch(by)
        for other in self._rounds_of(work.client) if self._ahead else ():  # it may have waited for this one
            if (node := self.where.get(other)) is not None:
                self._touch(node)

    def again(self, work: Assignment, now: float, *, keep: bool) -> None:
        """Work failed, and is given anew; what the node had of the client's later rounds comes after it."""
        self.tries[work] = self.tries.get(work, 0) + 1
        if not keep:
            node = self.where.get(work)
            later = [task.work for task in node.of(work.client) if task.work.round > work.round] if node else []
            self.place([work, *(other for other in later if other.kind == "fit")], now)

    def put_back(self, round: int, now: float) -> None:
        """Give what nodes have begun of a round once more: it was for an attempt that is discarded."""
        begun = (work for work, node in self.where.items() if node is not None and work in node.tasks)
        self.place([work for work in begun if work.kind == "fit" and work.round == round], now)

    def prune(self, now: float) -> None:
        """Stop what the lasting state does not ask for any more."""
        state = self._lasting
        for work in list(self.where):
            if work.kind == "fit":
                wanted = work.client in state.outstanding.get(work.round, ())
            else:
                wanted = work.round in state.measuring and work.client in state.measuring[work.round].waiting
            if not wanted or state.ended is not None:
                self.finish(work)
        newest = state.committed
        self.over = {what for what in self.over if what[1] >= newest}
        self.measured = {round for round in self.measured if round in state.measuring}
        self.deadlines = {round: at for round, at in self.deadlines.items() if round in state.begun}

    def asked(self, to: str, node: Node, now: float, wait: float) -> None:
        node.asks[to] = None
        self.asks[to] = node
        self.arm(now + wait, "ask", to)
        self._touch(node)

    def answered(self, to: str) -> None:
        node = self.asks.pop(to, None)
        if node is not None:
            node.asks.pop(to, None)
            self._touch(node)

    def _give(self, work: Assignment, node: Node) -> None:
        self.where[work] = node
        (node.queue if work.kind == "fit" else node.measures)[work] = None
        self._touch(node)

    def strand(self, work: Assignment, until: float) -> None:
        self.where[work] = None
        self.homeless[work] = until
        self.arm(until, "home", work)

    def _take(self, work: Assignment) -> Node | None:
        """Take work from wherever it lies; the node that was at it."""
        self.homeless.pop(work, None)
        node = self.where.get(work)
        if node is None:
            return None
        node.queue.pop(work, None)
        node.measures.pop(work, None)
        if node.tasks.pop(work, None) is not None:
            return node
        self._touch(node)
        return None

    # -- what is next --------------------------------------------------------------------------------------------------

    def next(self, node: Node, having: Collection[Assignment] = ()) -> Assignment | None:
        """What a free worker of a node would get; ``having``: what it has just said that it has."""
        for waiting in (node.measures, node.queue):
            for work in waiting:
                busy = work in having or (not self._ahead and bool(node.of(work.client)))
                if not busy and self.in_turn(work, node, having):
                    return work
        return None

    def in_turn(self, work: Assignment, node: Node, having: Collection[Assignment] = ()) -> bool:
        """Whether a node may be given work now: it is known to have, or somebody has done, the client's earlier rounds."""
        if any(one.client == work.client for one in node.stopping):
            return False
        if work.kind == "evaluate" or not self._ahead:
            return True
        return all(
            other in having or (other in node.tasks and node.tasks[other].steps >= 0)
            for other in self._rounds_of(work.client)
            if other.round < work.round
        )

    def _rounds_of(self, client: str) -> list[Assignment]:
        """Rounds that a client is asked for at the same time."""
        return [Assignment("fit", round, client) for round, them in self._lasting.outstanding.items() if client in them]

    def _beside(self, work: Assignment) -> Node | None:
        """The node that has another round of the client, whose state is there."""
        found = (self.where.get(other) for other in self._rounds_of(work.client) if other != work)
        return next((n for n in found if n is not None and n.lost is None and self.nodes.get(n.name) is n), None)

    def _touch(self, node: Node) -> None:
        if node.asks and node.lost is None and self.next(node) is not None:
            self.ready[node.name] = node
        else:
            self.ready.pop(node.name, None)


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
