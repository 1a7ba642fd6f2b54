"""Define the journal's records: applied in order they give a run's durable state.

The rules return them, `run_database` stores them as JSON, `run_state` applies them; `rounds.history` and progress displays read them.
Stored journals must stay readable: a new field needs a default, a record or field is never renamed, and a new record needs a case in
`RecordApplier.apply`. Connections, and which node has which work, are not recorded: nodes report it when they join.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arclight.federated.errors import Reason


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the journal."""


@dataclass(frozen=True, kw_only=True)
class RunOpened(Record):
    run: str
    settings: str
    """SHA-256 of the settings that decide the result."""


@dataclass(frozen=True, kw_only=True)
class RoundOpened(Record):
    """A round is opened, or retried by a second record, which keeps accepted updates."""

    round: int
    base: str
    """Digest of the weights' manifest."""
    clients: tuple[str, ...]
    """Sampled clients, over-provisioned ones included."""
    wanted: int
    """How many updates the round is for."""
    clock: int
    steps: int
    fragment: int | None = None
    least: int = 0
    """Number of updates that the round's clients divide its noise by, and without which it does not close; 0: no noise of theirs."""


@dataclass(frozen=True, kw_only=True)
class UpdateAccepted(Record):
    """An update is accepted: its blobs are here and valid."""

    round: int
    """The round that it goes into; the client began ``staleness`` rounds earlier."""
    client: str
    digest: str
    """Digest of its manifest, which is kept as a blob."""
    samples: int
    tokens: int
    steps: int
    seconds: float
    bytes: int
    norm: float
    """L2 norm of the decoded change (of ``model/`` keys)."""
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: int = 0
    """Rounds that were committed since the client began (buffered asynchronous mode)."""


@dataclass(frozen=True, kw_only=True)
class UpdatesLost(Record):
    """Accepted updates of a round were lost, as after a power failure.

    Their clients are asked again, which still have them or can make them again. In buffered mode they count as never
    received.
    """

    round: int
    clients: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateRefused(Record):
    round: int
    client: str
    reason: Reason
    message: str


@dataclass(frozen=True, kw_only=True)
class ClientFailed(Record):
    """A client is excluded from the round: it failed, or its node was lost without replacement."""

    round: int
    client: str
    message: str
    lost: bool = False
    """Whether it may be asked again if the round is: nobody answered for it, which is no error of its own."""
    redo: bool = False
    """Whether the update that it has finished is of no use: if it is asked again, it trains again."""


@dataclass(frozen=True, kw_only=True)
class RoundClosed(Record):
    """A round takes no more updates; these are aggregated in this order."""

    round: int
    clients: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundDiscarded(Record):
    """Updates of a round are discarded, and it is open again.

    It could not be aggregated, or its masked updates fit no secure sum any more.
    """

    round: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RoundSkipped(Record):
    """A round is skipped: its weights become those of the round before, and the run goes on."""

    round: int
    why: str


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Record):
    """The server's step is in the round's checkpoint. Round 0 holds the initial weights."""

    round: int
    base: str
    """Digest of the new weights' manifest."""
    checkpoint: str
    norm: float
    """L2 norm of the mean change."""
    drift: dict[str, float] = field(default_factory=dict)
    """Client to cosine between its change and the mean."""
    clock: int | None = None
    """Optimizer steps of the run up to these weights; None: those before the round and the round's own."""
    measured: bool = False
    """Whether these weights are measured: a run that is resumed with other periods does not measure what is long over."""


@dataclass(frozen=True, kw_only=True)
class RoundEvaluated(Record):
    """A round's weights were evaluated by ``client``; None: mean over clients, or the server."""

    round: int
    client: str | None
    samples: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RunEnded(Record):
    why: str
    failed: bool = False
    """Whether the run could not go on; it can be resumed from its last round."""
