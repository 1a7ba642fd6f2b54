"""Define the messages between nodes and server as JSON; tensors travel as blobs beside them.

A *node* is a process on some machine that runs one or more *clients*, each a site's data. Nodes send requests, the server
answers: join, then request work again and again (an answer may be held until there is some), send updates, and heartbeats while
they work. Every message carries the protocol's version; a node's carry its session, which stands for the run, and every
order names the run. All durations are seconds and relative: no two clocks need to agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arclight.federated.errors import ProtocolError, Reason
from arclight.federated.protocol.manifest import Manifest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

VERSION = 3
"""Of messages; those of manifests have a version of their own."""
_STORED = (1, 2, VERSION)
"""Of updates that nodes have kept."""

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message; `to_json` and `read` are inverse."""

    kinds: ClassVar[dict[str, type[Message]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()
        Message.kinds[cls.kind] = cls

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "version": VERSION, **asdict(self)}, allow_nan=False, sort_keys=True)


def read(text: str | bytes, *, stored: bool = False) -> Message:
    """Read a message. Raises ProtocolError for an invalid one, or one of another version.

    stored: it was kept here, maybe by an older version.
    """
    from pydantic import ValidationError

    try:
        said = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
        kind, version = said.pop("kind"), said.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ProtocolError(f"this is no message: {error!r}") from error
    if version != VERSION and not (stored and version in _STORED):
        raise ProtocolError(f"the other side speaks version {version!r}, this one {VERSION}: install the same arclight")
    if not isinstance(kind, str) or kind not in Message.kinds:
        raise ProtocolError(f"there is no message {kind!r}")
    try:
        return _adapter(kind).validate_json(json.dumps(said), strict=True)
    except ValidationError as error:
        raise ProtocolError(f"a message {kind!r} that cannot be: {error}") from error


@cache
def _adapter(kind: str) -> TypeAdapter[Message]:
    from pydantic import TypeAdapter

    return TypeAdapter(Message.kinds[kind])


def _finite(text: str) -> float:
    """Parse a finite number: a NaN or infinite one would spread through times and sums."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:30]} is no finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) >= 1 << 63:
        raise ValueError(f"{text[:30]} is larger than the whole numbers that are said here")
    return value


# -- from nodes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeldRound:
    """A round that a client has started or finished and the server has not acknowledged."""

    client: str
    round: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class ActiveWork:
    """Work of a node for a client, from the arrival of the order until its outcome is acknowledged."""

    client: str
    round: int
    kind: Literal["fit", "evaluate"] = "fit"
    steps: int = 0
    """That are done."""
    loss: float | None = None
    attempt: int = 0
    """As `Fit.attempt` of the order: what is still under way for an earlier one is not the round's any more."""


@dataclass(frozen=True, kw_only=True)
class Join(Message):
    """A node offers to work for its clients."""

    node: str
    """Name of the node, the same after a restart."""
    clients: tuple[str, ...]
    """Clients whose data this node has; empty: any that the server assigns."""
    held: tuple[HeldRound, ...] = ()
    key: str = ""
    """The node's public key, base64, if the server asks for registered nodes."""
    signature: str = ""
    """By that key, of the server's challenge and all of this message."""
    server: str = ""
    """Fingerprint of the certificate that the node sees; empty without TLS."""
    run: str = ""
    """The run that the server has said it serves: a signature is for one server and one run."""
    steps_per_second: float | None = None
    """Measured, for balancing and for simulation."""
    process: str = ""
    """Random name of this process: tells a restarted node from a second one of the same identity."""


@dataclass(frozen=True, kw_only=True)
class WorkRequest(Message):
    """Request work: a node has a free worker, or room to fetch an order ahead."""

    node: str
    session: str
    hold_s: float = 20.0
    """How long the answer may be held back."""
    active_work: tuple[ActiveWork, ...] = ()
    """What the node has already: an order that is not among it has not arrived."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """Heartbeat of a node, with the progress of its clients."""

    node: str
    session: str
    active_work: tuple[ActiveWork, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Update(Message):
    """A client's update of a round; its blobs have been uploaded."""

    node: str
    session: str
    client: str
    round: int
    manifest: Manifest
    samples: int
    tokens: int
    steps: int
    seconds: float
    """Time of training, without transfers."""
    metrics: Metrics = field(default_factory=dict)
    """Logged values of training, ``train/loss`` among them."""
    fragment: int | None = None
    secure: bool = False
    """Whether its values are masked before they leave the node, for a secure sum."""
    attempt: int = 0
    """Which of the round's secure sums it is masked for."""


@dataclass(frozen=True, kw_only=True)
class SecureSumRequest(Message):
    """One client's part in a round's secure sum, and a request for what it needs next.

    Binary values are hexadecimal. Each part may be said again; the first counts. See `arclight.federated.privacy.secure_aggregation`.
    """

    node: str
    session: str
    client: str
    round: int
    attempt: int = 0
    """Sums of the round that could not be opened before this one."""
    keys: dict[str, str] | None = None
    """Public keys: ``mask``, ``cipher``, ``seal``; and ``signature``, base64, by the node's key if it has one."""
    encrypted_shares: dict[str, str] | None = None
    """By partner, sealed."""
    unreadable: tuple[str, ...] | None = None
    """Partners whose encrypted shares could not be decrypted; sent once all were tried."""
    seed_shares: dict[str, str] | None = None
    """Parts of seeds, by the client that they are of."""
    key_shares: dict[str, str] | None = None
    """Parts of mask keys of those that dropped out, likewise."""
    waits_for: Literal["cohort", "encrypted_shares", "maskers", "survivors"] | None = None
    """What the client waits for: the fields of `SecureSumReply` that it needs next."""
    hold_s: float = 0.0
    """How long the answer may be held back until that is settled."""


def keys_text(run: str, number: int, attempt: int, client: str, keys: Mapping[str, str]) -> bytes:
    """Return the text that a node signs for a client's keys of a secure sum."""
    said = [
        run,
        str(number),
        str(attempt),
        client,
        *(keys.get(name, "").lower() for name in ("mask", "cipher", "seal")),
    ]
    return "\n".join(["arclight secure sum", *said]).encode()


@dataclass(frozen=True, kw_only=True)
class Evaluated(Message):
    """A client's evaluation of weights."""

    node: str
    session: str
    client: str
    round: int
    samples: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """A client's failure; the error's text is for people."""

    node: str
    session: str
    client: str
    round: int
    error: str
    retryable: bool = False
    """Whether another attempt may do better (a full disk), or would fail again (a shape)."""
    attempt: int | None = None
    """Of a fit: `Fit.attempt` of its order."""


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """A node leaves in order."""

    node: str
    session: str
    reason: str = ""
    """What keeps it from taking part, where something does."""


# -- from the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    session: str
    run: str
    heartbeat_interval_s: float
    """A node that has been silent three times as long counts as lost."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The run's recipe as tables, for nodes that build their task from it."""
    blob_address: str = ""
    """Address of the object store where blobs are; empty: at the server."""
    prefetch_rounds: int | None = 0
    """Rounds that a client may have beyond the one that it is at; None: a node asks only when a worker is free, as what is fetched
    early would begin from older weights than it must."""


@dataclass(frozen=True, kw_only=True)
class Fit(Message):
    """Train one client for a round."""

    run: str
    client: str
    round: int
    steps: int
    """Optimizer steps of this round."""
    clock: int
    """Optimizer steps of the run before this round, by which schedules go."""
    base: str
    """Digest of the weights' manifest to start from."""
    weights: Manifest
    """Those weights, whole."""
    changes: tuple[Manifest, ...] = ()
    """A chain of changes, oldest first, each from its ``base`` to the next and the last to ``base``, for nodes that have one of them."""
    form: str = "delta"
    """"delta": weights before minus weights after; "weights": the weights after."""
    codec: dict[str, Any] = field(default_factory=lambda: {"kind": "raw"})
    """Of the update."""
    weigh_by: str = "samples"
    seed: int = 0
    """For what a client draws in this round: randomised layers, noise, masks."""
    deadline_s: float | None = None
    """Seconds from now after which the update is not waited for."""
    checkpoint_every_steps: int = 50
    """Steps between saves of a client's own progress."""
    local_policy: dict[str, Any] = field(default_factory=dict)
    """What a client keeps of its own: reset_optimizer, personal, randomised and frozen layers."""
    privacy: dict[str, Any] = field(default_factory=dict)
    fragment: int | None = None
    overlap: int = 0
    """Rounds of the client just before this one whose updates may still be on their way when this one begins."""
    attempt: int = 0
    """How often the round could not be folded before: an order with another number is another order."""
    redo: bool = False
    """Whether an update of this round that the client has finished already is of no use, so that it trains again."""
    residual_slot: int = 0
    """An update adds the residuals of the last one in its slot. Updates that may be under way together have slots of their own."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Message):
    """Evaluate weights on a client's validation data."""

    run: str
    client: str
    round: int
    base: str
    weights: Manifest
    changes: tuple[Manifest, ...] = ()
    deadline_s: float | None = None
    local_policy: dict[str, Any] = field(default_factory=dict)
    """What a client keeps of its own, as in `Fit`: with that the weights are measured."""


@dataclass(frozen=True, kw_only=True)
class Wait(Message):
    """Nothing to do now; request again after ``retry_after_s``."""

    retry_after_s: float
    waiting_for: str = ""
    """What is waited for, for logs."""


@dataclass(frozen=True, kw_only=True)
class SecureSumReply(Message):
    """The answer to `SecureSumRequest.waits_for` for a client of a secure sum; fields are None until they are settled."""

    cohort: tuple[str, ...] | None = None
    """Clients that take part."""
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Theirs, with the cohort, each with the ``node`` that gave them."""
    encrypted_shares: dict[str, str] | None = None
    """To this client, by sender."""
    maskers: tuple[str, ...] | None = None
    """Clients that mask with each other: those that could read each other's encrypted shares."""
    survivors: tuple[str, ...] | None = None
    """Clients whose masked values are in the sum."""
    finished: bool = False
    """Whether the round needs nothing more of this client."""


@dataclass(frozen=True, kw_only=True)
class Close(Message):
    """The run is over for this node."""

    reason: str
    failed: bool = False
    """Whether the run could not go on, or has no place for this node."""


@dataclass(frozen=True, kw_only=True)
class Receipt(Message):
    """Acceptance or refusal of a node's message."""

    accepted: bool
    reason: Reason | None = None
    message: str = ""
    committed: int = -1
    """Newest round that is committed: what a node kept for rounds up to it can go."""
    cancel: tuple[ActiveWork, ...] = ()
    """What of the node's work is no longer wanted."""
