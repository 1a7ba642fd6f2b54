"""Settings of sampling, waiting, and buffered or streamed rounds (no torch here)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from arclight._intervals import (
    Checked,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    ProperFraction,
    former_names,
)

Seconds = Annotated[float, Interval(ge=0, le=1e9)]
"""A wait: clocks and timers end somewhere."""
PositiveSeconds = Annotated[float, Interval(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class Hours(Checked):
    """Clients that can be reached at certain hours of their day only, as telephones that are charged at night."""

    per_round: NonNegativeFloat = 1.0
    """Hours that a round stands for: round r is drawn at hour r times this."""
    length: Annotated[float, Interval(gt=0, le=24)] = 8.0
    """Hours a day at which a client can be reached, in (0, 24]; when they begin differs from client to client."""
    outside: Fraction = 0.0
    """Chance that a client answers at another hour, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """Sample the clients of a round by the run's seed and the round's number, so that a resumed run draws the same."""

    per_round: PositiveInt | None = None
    """Clients per round; none for all."""
    over_provision: NonNegativeFloat = 0.0
    """Further clients that are asked, as a share of those wanted: the round takes the first that answer."""
    dropout: ProperFraction = 0.0
    """Share of the drawn clients that are left out, to see what dropouts do, in [0, 1)."""
    hours: Hours | None = None
    """Dropouts that depend on the client: its hours of the day."""


@former_names(
    grace="grace_s",
    deadline="deadline_s",
    join="join_timeout_s",
    beat_every="heartbeat_interval_s",
    lease="lease_s",
    stall="no_progress_timeout_s",
)
@dataclass(frozen=True, kw_only=True)
class Waiting(Checked):
    """Wait for clients and nodes. Durations are in seconds."""

    quorum: PositiveFraction = 0.75
    """Share of the wanted updates with which a round may close, in (0, 1]: of 4 clients one may be away, of 10 two."""
    grace_s: Seconds | None = None
    """Once there is a quorum, how long others may still arrive; none: as long as their nodes are alive and get on, so that only
    clients that have failed or are away are left out."""
    deadline_s: PositiveSeconds | None = None
    """After this a round closes with a quorum or fails without one; none waits as long as nodes are alive and get on."""
    join_timeout_s: PositiveSeconds = 3600.0
    """How long to wait for nodes before the first round, after all have gone, and for one that has gone and without whose clients
    there is no quorum."""
    nodes: PositiveInt = 1
    """Nodes required before the first round."""
    heartbeat_interval_s: PositiveSeconds = 0.5
    """Interval of nodes' heartbeats; a node that is silent for three of them is lost."""
    lease_s: Seconds = 300.0
    """How long a lost node's started work is kept for it: one that is restarted goes on where it was. Then another node takes it,
    or, if only that node has the data, rounds with a quorum go on without, until it is back."""
    no_progress_timeout_s: PositiveSeconds = 1800.0
    """A node that is alive but makes no step and sends nothing for this long is lost."""
    attempts: PositiveInt = 3
    """How often one client is asked in a round if its failures may pass (a full disk, a damaged upload)."""
    retries: NonNegativeInt = 1
    """How often a round that did not reach its quorum asks other or returned clients, or one that could not be folded its own,
    before it is given up."""
    on_failed_round: Literal["stop", "skip"] = "stop"
    """What follows then: the run ends and can be resumed, or the round is skipped - its weights are those of the round before -
    and the next one begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_failed_round not in ("stop", "skip"):
            raise ValueError(f'on_failed_round is "stop" or "skip", got {self.on_failed_round!r}')

    def need(self, wanted: int) -> int:
        """Count the updates that are a quorum of ``wanted``."""
        return max(1, math.ceil(self.quorum * wanted - 1e-9))

    @property
    def silence_s(self) -> float:
        """Return the seconds after which a silent node is lost."""
        return 3 * self.heartbeat_interval_s


@dataclass(frozen=True, kw_only=True)
class Buffered(Checked):
    """Asynchronous rounds (FedBuff, Nguyen et al. 2022): step whenever ``size`` updates have come; stale ones move the weights less."""

    size: PositiveInt = 10
    """Buffered updates per server step."""
    most_stale: NonNegativeInt = 10
    """Older updates, in server steps, are refused."""


@dataclass(frozen=True, kw_only=True)
class Streaming(Checked):
    """Exchange in fragments while training goes on (streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512).

    A round is ``local_steps / fragments`` steps long and exchanges one fragment, so each fragment's turn comes every
    ``local_steps`` steps: that of round r is ``r % fragments`` (as `arclight.optim.outer.due`).
    """

    fragments: PositiveInt = 4
    """Fragments of the model."""
    overlap: NonNegativeInt = 1
    """Rounds during which an exchange may be under way while clients train on; round r begins from the weights of round
    ``r - 1 - overlap``."""
    mix: Fraction = 0.5
    """Share of its own fragment that a client keeps when the server's arrives, in [0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= max(2, self.fragments):
            raise ValueError(f"overlap must be below fragments = {self.fragments}, got {self.overlap}")
