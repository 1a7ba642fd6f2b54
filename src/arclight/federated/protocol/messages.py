"""Define the messages between nodes and server as JSON; tensors travel as blobs beside them.

A *node* is a process that trains for one or more *clients*, each the data of a site. A node joins, then requests work repeatedly (long
polling: the server may hold an answer), sends updates, and heartbeats while it works; the server only answers. All messages of a node but
`Join` carry its session. All durations are relative, in seconds: no two clocks need to agree.

This is a wire format, and nodes store updates in it: a changed or removed field needs a new `VERSION`, and `read` must still accept
`_STORED` ones. A new message of nodes needs a case in `server.service`. Import the names from `arclight.federated.protocol`.
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
"""Version of the messages; manifests have their own."""
_STORED = (1, 2, VERSION)
"""Versions of stored updates that are still read."""

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; a subclass is registered under its lower-case name.

    `read` is the inverse of `to_json`.
    """

    kinds: ClassVar[dict[str, type[Message]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()
        Message.kinds[cls.kind] = cls

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "version": VERSION, **asdict(self)}, allow_nan=False, sort_keys=True)


def read(text: str | bytes, *, stored: bool = False) -> Message:
    """Read a message. Raises ProtocolError for an invalid one, or one of another version.

    stored: the message comes from this machine's disk, and may have been written by an older version.
    """
    from pydantic import ValidationError

    try:
        table = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
        kind, version = table.pop("kind"), table.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ProtocolError(f"this is not a message of the protocol: {error!r}") from error
    if version != VERSION and not (stored and version in _STORED):
        raise ProtocolError(f"the other side speaks version {version!r}, this one {VERSION}: install the same arclight")
    if not isinstance(kind, str) or kind not in Message.kinds:
        raise ProtocolError(f"there is no message {kind!r}; there are {', '.join(sorted(Message.kinds))}")
    try:
        return _adapter(kind).validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        raise ProtocolError(f"invalid message {kind!r}: {error}") from error


@cache
def _adapter(kind: str) -> TypeAdapter[Message]:
    from pydantic import TypeAdapter

    return TypeAdapter(Message.kinds[kind])


def _finite(text: str) -> float:
    """Parse a finite number; NaN or infinity would propagate through times and sums."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:30]} is NaN or infinite")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) >= 1 << 63:
        raise ValueError(f"{text[:30]} is larger than the whole numbers of the protocol, which have 64 bits")
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
    """Work of a node for a client, from the arrival of the order until it is acknowledged."""

    client: str
    round: int
    kind: Literal["fit", "evaluate"] = "fit"
    steps: int = 0
    """Optimizer steps that are done."""
    loss: float | None = None
    attempt: int = 0
    """`Fit.attempt` of the order; work for an earlier attempt no longer counts."""


@dataclass(frozen=True, kw_only=True)
class Join(Message):
    """Offer to work for clients: a node's first message."""

    node: str
    """Name of the node, the same after a restart."""
    clients: tuple[str, ...]
    """Clients whose data this node has; empty: any that the server assigns."""
    held: tuple[HeldRound, ...] = ()
    key: str = ""
    """The node's public key, base64, if the server asks for registered nodes."""
    signature: str = ""
    """Signature with that key over the server's challenge and all other fields."""
    server: str = ""
    """Fingerprint of the certificate that the node sees; empty without TLS."""
    run: str = ""
    """The run that the server serves, by its challenge: a signature is for one server and one run."""
    steps_per_second: float | None = None
    """Measured speed, for balancing and simulation."""
    process: str = ""
    """Random name of this process: distinguishes a restarted node from a second one of the same identity."""


@dataclass(frozen=True, kw_only=True)
class WorkRequest(Message):
    """Request work: a node has a free worker, or room to fetch an order ahead."""

    node: str
    session: str
    hold_s: float = 20.0
    """How long the answer may be held back."""
    active_work: tuple[ActiveWork, ...] = ()
    """Work that the node has already; an order that is not listed has not arrived."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """Show that a node is alive, with the progress of its clients."""

    node: str
    session: str
    active_work: tuple[ActiveWork, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Update(Message):
    """Send a client's update of a round; its blobs have been uploaded."""

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
    """Send a client's part in a round's secure sum, and request what it needs next.

    Binary values are hexadecimal. A part may be sent again: the first counts, but keys may change until the cohort is settled.
    See `arclight.federated.privacy.secure_aggregation`.
    """

    node: str
    session: str
    client: str
    round: int
    attempt: int = 0
    """How many secure sums of this round failed before this one."""
    keys: dict[str, str] | None = None
    """Public keys: ``mask``, ``cipher``, ``seal``; and ``signature``, base64, by the node's key if it has one."""
    encrypted_shares: dict[str, str] | None = None
    """Encrypted shares by partner."""
    unreadable: tuple[str, ...] | None = None
    """Partners whose encrypted shares could not be decrypted; sent once all were tried."""
    seed_shares: dict[str, str] | None = None
    """Shares of seeds, by the client whose seed it is."""
    key_shares: dict[str, str] | None = None
    """Shares of mask keys of clients that dropped out, by client."""
    waits_for: Literal["cohort", "encrypted_shares", "maskers", "survivors"] | None = None
    """What the client waits for: the fields of `SecureSumReply` that it needs next."""
    hold_s: float = 0.0
    """How long the answer may be held back until that is settled."""


def keys_text(run: str, number: int, attempt: int, client: str, keys: Mapping[str, str]) -> bytes:
    """Return the text that a node signs for a client's keys of a secure sum."""
    fields = [
        run,
        str(number),
        str(attempt),
        client,
        *(keys.get(name, "").lower() for name in ("mask", "cipher", "seal")),
    ]
    return "\n".join(["arclight secure sum", *fields]).encode()


@dataclass(frozen=True, kw_only=True)
class Evaluated(Message):
    """Send a client's evaluation of weights."""

    node: str
    session: str
    client: str
    round: int
    samples: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Failed(Message):
    """Report a client's failure; ``error`` is a text for people."""

    node: str
    session: str
    client: str
    round: int
    error: str
    retryable: bool = False
    """True if another attempt may succeed (the disk was full), False if it would fail again (a wrong shape)."""
    attempt: int | None = None
    """`Fit.attempt` of the order; None for an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Leave(Message):
    """Leave the run in an orderly way."""

    node: str
    session: str
    reason: str = ""
    """Why the node cannot take part, if that is why it leaves."""


# -- from the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """Accept a node."""

    session: str
    run: str
    heartbeat_interval_s: float
    """Seconds between heartbeats; a node that is silent for three times as long counts as lost."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The run's recipe as tables, for nodes that build their task from it."""
    blob_address: str = ""
    """Address of the object store that holds blobs; empty: the server does."""
    prefetch_rounds: int | None = 0
    """Rounds that a client may fetch ahead of the one it trains; None: a node requests work only when a worker is free, so that each
    order starts from the newest weights."""


@dataclass(frozen=True, kw_only=True)
class Fit(Message):
    """Train one client for a round."""

    run: str
    client: str
    round: int
    steps: int
    """Optimizer steps of this round."""
    clock: int
    """Optimizer steps of the run before this round: the position of learning-rate schedules."""
    base: str
    """Digest of the weights' manifest to start from."""
    weights: Manifest
    """Those weights in full."""
    changes: tuple[Manifest, ...] = ()
    """A delta chain, oldest first, that ends at ``base``: a node that has the weights of one of its bases fetches the changes after it only."""
    form: str = "delta"
    """"delta": weights before minus weights after; "weights": the weights after."""
    codec: dict[str, Any] = field(default_factory=lambda: {"kind": "raw"})
    """Settings of the codec for the update."""
    weigh_by: str = "samples"
    seed: int = 0
    """Seed of everything that the client draws in this round: randomised layers, noise, masks."""
    deadline_s: float | None = None
    """Seconds from now after which the round closes without the update."""
    checkpoint_every_steps: int = 50
    """Steps between saves of a client's own progress."""
    local_policy: dict[str, Any] = field(default_factory=dict)
    """``reset_optimizer``, and the client's masks (`TransferMask.to_table`): which tensors it loads, trains, sends and keeps."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """``noise`` to add and ``secure`` sum to mask for, if any; a node refuses other keys."""
    fragment: int | None = None
    overlap: int = 0
    """How many of the client's previous updates may still be on their way when this round begins."""
    attempt: int = 0
    """How often updates of the round were discarded before; orders of different attempts are different orders."""
    redo: bool = False
    """True if the client must train again, even if it has a finished update of this round."""
    residual_slot: int = 0
    """Slot of error feedback: an update adds the residuals of the last one of its slot. Concurrent updates have different slots."""


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
    """The client's masks, as in `Fit`: it evaluates the weights with its own personal and randomised tensors."""


@dataclass(frozen=True, kw_only=True)
class Wait(Message):
    """Make the node request again after ``retry_after_s``: there is nothing to do now."""

    retry_after_s: float
    waiting_for: str = ""
    """What is waited for, for logs."""


@dataclass(frozen=True, kw_only=True)
class SecureSumReply(Message):
    """Answer `SecureSumRequest.waits_for`; a field is None until it is settled."""

    cohort: tuple[str, ...] | None = None
    """Clients that take part in the sum."""
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Public keys of the cohort by client, each with the ``node`` that sent them."""
    encrypted_shares: dict[str, str] | None = None
    """Encrypted shares for this client, by sender."""
    maskers: tuple[str, ...] | None = None
    """Clients that mask with each other: those that could read each other's encrypted shares."""
    survivors: tuple[str, ...] | None = None
    """Clients whose masked values are in the sum."""
    finished: bool = False
    """Whether the round needs nothing more of this client."""


@dataclass(frozen=True, kw_only=True)
class Close(Message):
    """End the run for this node."""

    reason: str
    failed: bool = False
    """True if the run failed or refuses this node."""


@dataclass(frozen=True, kw_only=True)
class Receipt(Message):
    """Acceptance or refusal of a node's message."""

    accepted: bool
    reason: Reason | None = None
    message: str = ""
    committed: int = -1
    """Newest committed round: a node may delete what it kept for rounds up to it."""
    cancel: tuple[ActiveWork, ...] = ()
    """Work of the node that is no longer wanted."""
