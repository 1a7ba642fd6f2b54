"""What the coordinator hears and what it wants done: the contract between it and whoever drives it.

A driver has a clock, a journal and the connections; the coordinator has none of them. For every event the driver does, under
one lock and in this order (`driving.drive` does all of it)::

    decision = coordinator.decide(event, now)      # nothing has changed yet
    journal.append(decision.records)               # on disk when this returns; where it raises, nothing has happened
    coordinator.apply(decision)
    carry out decision.commands
    the same with Tick() until a decision is empty, and again whenever `next_deadline` has come

Every event of a node carries ``to``, the driver's own name for the request. Each is answered by exactly one `Answer` in the
decision itself, except `Asked`: an ask may be held, and is answered by a later decision (at the latest when its wait is over).
``now`` is seconds of any clock that does not go back. A driver that was restarted calls ``replay(journal.records())`` and then
decides `RunResumed`; one that begins a run decides `RunStarted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arclight.federated.coordination.records import Record, UpdateAccepted
from arclight.federated.errors import Reason
from arclight.federated.protocol import Close, Doing, Held, Receipt, Wait

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A new run has its first weights, which are round ``round`` (0, or the round that the run was forked from)."""

    base: str
    """Digest of the weights' manifest."""
    checkpoint: str
    round: int = 0
    clock: int = 0
    """Optimizer steps that these weights have behind them."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """The driver is back: the journal was replayed. Folds that were under way are asked for again, waits begin anew."""


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, kw_only=True)
class Said(Event):
    """A message of a node. ``to`` is what the answer is addressed to."""

    to: str


@dataclass(frozen=True, kw_only=True)
class Joined(Said):
    """A node offers to work. Answered by Welcoming, by Wait (another process of this name may still live: join again) or by Close."""

    node: str
    session: str
    """A fresh random name for this connection of the node, made by the driver; all later messages carry it."""
    process: str = ""
    clients: tuple[str, ...] = ()
    """Clients whose data only this node has; empty: any that it is given."""
    held: tuple[Held, ...] = ()
    steps_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Asked(Said):
    """A worker of a node is free. Answered, perhaps later, by FitPlan, EvaluatePlan, Wait or Close.

    A client is given one thing at a time, except where exchanges overlap with training: then an ask while it is at a round may
    bring its next one (up to `Streaming.overlap` ahead), to be fetched meanwhile and begun after it. Rounds of a client are given
    in their order, each once the node has said that it has those before.
    """

    session: str
    wait: float
    """The longest that the answer may be held, in seconds."""
    doing: tuple[Doing, ...] = ()
    """What the node has already."""


@dataclass(frozen=True, kw_only=True)
class Beaten(Said):
    """A node lives. It names all that it does, each from the moment that it has the order. Answered by a Receipt."""

    session: str
    doing: tuple[Doing, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UpdateValidated(Said):
    """An update whose blobs are on disk and that is sound. Answered by a Receipt; it counts only if that says accepted.

    Before fetching and checking an update ask `Coordinator.refusal`, which costs nothing.
    """

    session: str
    client: str
    round: int
    """As the client says it: the round that it was asked to fit."""
    digest: str
    samples: int
    tokens: int
    steps: int
    seconds: float
    bytes: int
    norm: float
    metrics: dict[str, float] = field(default_factory=dict)
    attempt: int | None = None
    """`FitPlan.discarded` of the order, for a secure sum: it goes into that sum only."""


@dataclass(frozen=True, kw_only=True)
class UpdateRejected(Said):
    """An update that the driver's checks refuse. "damaged" may be sent again; any other reason puts the client out of the round."""

    session: str
    client: str
    round: int
    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class WorkFailed(Said):
    """A client could not fit or evaluate. Answered by a Receipt."""

    session: str
    client: str
    round: int
    error: str
    again: bool = False
    attempt: int | None = None
    """`FitPlan.discarded` of the order to fit, where that is known."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedBy(Said):
    """A client has measured weights. Answered by a Receipt."""

    session: str
    client: str
    round: int
    samples: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Left(Said):
    """A node ends in order. Answered by a Receipt."""

    session: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundStored(Event):
    """The driver has done a Fold: the server's step lies in a whole checkpoint."""

    round: int
    base: str
    checkpoint: str
    norm: float
    drift: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AggregationFailed(Event):
    """The driver could not do a Fold. Nothing of the step is left behind."""

    round: int
    why: str
    clients: tuple[str, ...] = ()
    """Those whose updates are to blame, as far as that is known: they are left out when the round is asked for again."""


@dataclass(frozen=True, kw_only=True)
class ServerEvaluated(Event):
    """The driver has done a Measure. Without metrics: it has nothing to measure with, or could not."""

    round: int
    samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """The driver cannot go on (a fold failed, a person stops the run): every node is told, the journal says so."""

    why: str


# -- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something for the driver to do."""


@dataclass(frozen=True, kw_only=True)
class SessionGranted:
    """The node is let in under the session that the driver has given it."""

    session: str


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Train a client: what of `Fit` is decided here; manifests and codecs are the driver's to add."""

    client: str
    round: int
    fragment: int | None
    base: str
    clock: int
    steps: int
    seed: int
    """The same for this client and round whoever trains it and however often."""
    deadline: float | None
    """Seconds from now."""
    discarded: int = 0
    """How often the round could not be folded before."""
    least: int = 0
    """As `RoundOpened.least`."""
    redo: bool = False
    """Whether what the client has finished for this round is of no use."""


@dataclass(frozen=True, kw_only=True)
class EvaluatePlan:
    """Measure committed weights on a client's data."""

    client: str
    round: int
    base: str
    deadline: float | None


@dataclass(frozen=True, kw_only=True)
class Answer(Command):
    """Reply to what ``to`` names. A session that is not known gets ``Receipt(accepted=False, reason="session")``: join again."""

    to: str
    plan: SessionGranted | FitPlan | EvaluatePlan | Wait | Close | Receipt


@dataclass(frozen=True, kw_only=True)
class Aggregate(Command):
    """A round is closed: fold its updates, in this order (that of the clients), step, write the checkpoint, then say `RoundStored`.
    Without updates the round is skipped: write the former weights as its own. What cannot be folded is a `AggregationFailed`.

    Given once for each round and again after `RunResumed`. Rounds are folded one at a time, each from the weights before it.
    """

    round: int
    fragment: int | None
    clock: int
    """Optimizer steps of the run up to the new weights."""
    updates: tuple[UpdateAccepted, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluateOnServer(Command):
    """Evaluate a committed round's weights on the server's data and say `ServerEvaluated`; rounds go on meanwhile."""

    round: int
    base: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(Command):
    """A node is counted as gone: it was silent, made no progress, or says what keeps it from taking part. For logs; its clients are looked after."""

    node: str
    session: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node} is lost: {self.why}"


@dataclass(frozen=True, kw_only=True)
class ClientMoved(Command):
    """A client's work goes to another node, for logs."""

    client: str
    round: int
    node: str
    """The one that had it."""

    def __str__(self) -> str:
        return f"round {self.round}: client {self.client} moves from node {self.node} to another"


@dataclass(frozen=True, kw_only=True)
class ClientNotEvaluated(Command):
    """A client could not measure a round, whose metrics are without it, for logs."""

    client: str
    round: int
    why: str

    def __str__(self) -> str:
        return f"round {self.round} is measured without client {self.client}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class LogMessage(Command):
    """A line for the log: who or what is waited for."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunOver(Command):
    """The run is over; asks that come now are answered with Close. ``failed``: why it could not go on."""

    why: str
    failed: bool


@dataclass(frozen=True, kw_only=True)
class Note:
    """A change of what is not kept in the journal; the coordinator's own business."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows from an event. False where nothing does: then it need not be applied if the event is a `Tick`."""

    event: Event
    now: float
    records: tuple[Record, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[Note, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.records or self.commands or self.notes)
