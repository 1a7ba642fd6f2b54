"""Define events, decisions and commands: the contract of the coordinator and its driver.

``server.runtime`` and ``simulation.simulator`` are drivers: they have a clock, a journal and the connections, the coordinator has none of them.
For every event the driver does, under one lock and in this order (`coordinator.run_to_quiescence` does it, and yields the commands)::

    decision = coordinator.decide(event, now)      # nothing has changed yet
    journal.append(decision.records)               # on disk when this returns; if it raises, nothing has happened
    coordinator.apply(decision)
    execute decision.commands
    the same with Tick() until a decision is empty, and again whenever `next_deadline` has come

Every message of a node is answered by exactly one `Answer` in its own decision, except a `WorkRequest`: it may be held, and is answered
by a later decision (at the latest when its wait is over). ``now`` is seconds of any clock that does not go back. A driver that
was restarted calls ``replay(journal.records())`` and then decides `RunResumed`; one that starts a run decides `RunStarted`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from arclight.federated.coordination.records import Record, UpdateAccepted
from arclight.federated.errors import Reason
from arclight.federated.protocol import (
    Close,
    Evaluated,
    Failed,
    Heartbeat,
    Join,
    Leave,
    Receipt,
    Update,
    Wait,
    WorkRequest,
)

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A new run has its first weights, as round ``round``.

    That is 0, or the round that the run was forked from.
    """

    base: str
    """Digest of the weights' manifest."""
    checkpoint: str
    round: int = 0
    clock: int = 0
    """Optimizer steps that these weights have behind them."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """The journal was replayed: aggregations are commanded again, timers start again."""


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class NodeMessage(Event):
    """Message from a node; ``to`` is the driver's name for the request, for the answer.

    Answers are, to a `Join`: SessionGranted, Wait (another process of this name may still live: join again) or Close; to a
    `WorkRequest`, perhaps later: FitPlan, EvaluatePlan, Wait or Close; to all others, and in an unknown session: a Receipt.
    """

    to: str
    message: Join | WorkRequest | Heartbeat | Update | Evaluated | Failed | Leave
    session: str
    """The connection of the node that it comes from; of a `Join`, a fresh random name for that connection, made by the driver."""


@dataclass(frozen=True, kw_only=True)
class UpdateValidated(NodeMessage):
    """Update whose blobs are on disk and valid.

    It counts only if its Receipt says accepted. Before an update is fetched and checked, `Coordinator.refusal` says at
    no cost if it would be refused.
    """

    message: Update
    digest: str
    """Digest of its manifest."""
    norm: float
    """L2 norm of the decoded change (of ``model/`` keys)."""


@dataclass(frozen=True, kw_only=True)
class UpdateRejected(NodeMessage):
    """Update that the driver's checks refuse.

    "damaged" may be sent again, up to ``waiting.attempts`` times; any other reason excludes the client from the round.
    """

    message: Update
    reason: Reason
    why: str


@dataclass(frozen=True, kw_only=True)
class RoundStored(Event):
    """The driver has aggregated a round: the server's step is stored in a complete checkpoint."""

    round: int
    base: str
    checkpoint: str
    norm: float
    drift: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AggregationFailed(Event):
    """The driver could not aggregate a round. Nothing of the step is left behind."""

    round: int
    why: str
    clients: tuple[str, ...] = ()
    """Clients whose updates are to blame, as far as known: they are left out when the round is asked for again."""


@dataclass(frozen=True, kw_only=True)
class ServerEvaluated(Event):
    """The driver has evaluated weights. Without metrics: it has no evaluation, or it failed."""

    round: int
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """Stop of the run by a person or an error: all nodes are notified, the journal records it."""

    why: str


# -- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something for the driver to execute."""


@dataclass(frozen=True, kw_only=True)
class SessionGranted:
    """Grant the node the session that the driver has made for it."""

    session: str


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Order to train a client, as decided here.

    The driver adds manifests and codecs to make it a `Fit`.
    """

    client: str
    round: int
    fragment: int | None
    base: str
    clock: int
    steps: int
    seed: int
    """The same for this client and round at any node and in any attempt."""
    deadline_s: float | None
    """Seconds from now."""
    discarded: int = 0
    """Times that the round was discarded before."""
    least: int = 0
    """See `RoundOpened.least`."""
    redo: bool = False
    """The client must train again: its finished update of this round is of no use."""


@dataclass(frozen=True, kw_only=True)
class EvaluatePlan:
    """Evaluate committed weights on a client's data."""

    client: str
    round: int
    base: str
    deadline_s: float | None
    """Seconds from now."""


@dataclass(frozen=True, kw_only=True)
class Answer(Command):
    """Answer the request ``to``.

    An unknown session gets ``Receipt(accepted=False, reason="session")``: join again.
    """

    to: str
    plan: SessionGranted | FitPlan | EvaluatePlan | Wait | Close | Receipt


@dataclass(frozen=True, kw_only=True)
class Aggregate(Command):
    """Aggregate a closed round's updates in this order, step, save, report `RoundStored`.

    The order is that of the clients, and what is saved is the round's checkpoint. Without updates the round is skipped:
    write the former weights as its own. A failure is reported as `AggregationFailed`. Commanded once each time that a round is
    closed, and again after `RunResumed`. Rounds are aggregated one at a time, each from the weights before.
    """

    round: int
    fragment: int | None
    clock: int
    """Optimizer steps of the run up to the new weights."""
    updates: tuple[UpdateAccepted, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluateOnServer(Command):
    """Evaluate a committed round's weights on the server's data; report `ServerEvaluated`.

    Rounds go on meanwhile.
    """

    round: int
    base: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(Command):
    """Log that a node is lost: silent, without progress, or gone by itself with a reason.

    The rules reassign its work: what is queued at once, what it had started when its lease ends or it has left.
    """

    node: str
    session: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} is lost: {self.why}"


@dataclass(frozen=True, kw_only=True)
class ClientMoved(Command):
    """Log that a client's work goes to another node."""

    client: str
    round: int
    node: str
    """The node that had it."""

    def __str__(self) -> str:
        return f"round {self.round}: client {self.client} moves from node {self.node} to another"


@dataclass(frozen=True, kw_only=True)
class ClientNotEvaluated(Command):
    """Log that a client could not evaluate a round, whose metrics are without it."""

    client: str
    round: int
    why: str

    def __str__(self) -> str:
        return f"round {self.round} is measured without client {self.client}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class LogMessage(Command):
    """Log a line on what the run waits for."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunOver(Command):
    """End the run; later requests are answered with Close. failed: it could not go on."""

    why: str
    failed: bool


Change = Callable[[], None]
"""A change of the cluster's state, which is not in the journal: a bound method of `ClusterState` with its arguments."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that follows from an event.

    Falsy if nothing does: then it need not be applied if the event is a `Tick`.
    """

    event: Event
    now: float
    before: tuple[Change, ...] = ()
    """Changes that come before the records."""
    records: tuple[Record, ...] = ()
    changes: tuple[Change, ...] = ()
    """Changes that come after the records."""
    commands: tuple[Command, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.records or self.changes or self.commands)
