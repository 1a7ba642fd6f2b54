"""Define settings of sampling, waiting, and buffered or streamed rounds, without torch.

`Federation` (``federated.settings``) holds them, as tables of a recipe; the coordinator decides by them, and masks by `Streaming`. Field
names are recipe keys. A resumed run may have another `Waiting`, and must have the other settings it was begun with.
"""

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
"""A wait of at most 1e9 s, which every clock and timer can hold."""
PositiveSeconds = Annotated[float, Interval(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class Hours(Checked):
    """Clients are available at certain hours of their day only, as phones that charge at night."""

    per_round: NonNegativeFloat = 1.0
    """Hours of a round: round r is sampled at hour r times this."""
    length: Annotated[float, Interval(gt=0, le=24)] = 8.0
    """Hours a day at which a client is available, in (0, 24]; their start differs from client to client."""
    outside: Fraction = 0.0
    """Probability that a client is available at another hour, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """Settings of client sampling, by the run's seed and the round, so that resuming repeats it."""

    per_round: PositiveInt | None = None
    """Clients per round; none for all."""
    over_provision: NonNegativeFloat = 0.0
    """Additional clients to sample, as a share of those wanted: the round takes the first updates."""
    dropout: ProperFraction = 0.0
    """Simulated dropout: share of the sampled clients that does not train, in [0, 1)."""
    hours: Hours | None = None
    """Simulated availability of clients by hours of the day."""


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
    """Share of the wanted updates with which a round may close, in (0, 1]: of 4 clients one may be missing, of 10 two."""
    grace_s: Seconds | None = None
    """Time for further updates after the quorum; none: while their nodes are alive and make progress, so that only
    failed or missing clients are excluded."""
    deadline_s: PositiveSeconds | None = None
    """Timeout after which a round closes with a quorum or fails without one; none waits while nodes are alive and make progress."""
    join_timeout_s: PositiveSeconds = 3600.0
    """Timeout for nodes to join before the first round, after all have left, and for one without whose clients
    there is no quorum."""
    nodes: PositiveInt = 1
    """Nodes required before the first round."""
    heartbeat_interval_s: PositiveSeconds = 0.5
    """Interval of nodes' heartbeats; a node that is silent for three of them is lost."""
    lease_s: Seconds = 300.0
    """How long a lost node's work is reserved for it: a restarted node resumes it. Then another node takes it,
    or, if only that node has the data, rounds with a quorum continue without it, until it returns."""
    no_progress_timeout_s: PositiveSeconds = 1800.0
    """A node that is alive but makes no step and sends nothing for this long counts as lost."""
    attempts: PositiveInt = 3
    """Attempts of one client in a round after transient failures (a full disk, a damaged upload)."""
    retries: NonNegativeInt = 1
    """Retries of a round without a quorum, with other or returned clients, or of one that could not be aggregated, with its own,
    before it fails."""
    on_failed_round: Literal["stop", "skip"] = "stop"
    """Action then: stop the run, which can be resumed, or skip the round - it keeps the weights of the round before -
    and start the next one."""

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


@former_names(most_stale="max_staleness")
@dataclass(frozen=True, kw_only=True)
class Buffered(Checked):
    """Settings of asynchronous rounds (FedBuff, Nguyen et al. 2022).

    The server steps after every ``size`` updates; the change of one that is n steps stale is multiplied by 1 / sqrt(1 + n).
    """

    size: PositiveInt = 10
    """Buffered updates per server step."""
    max_staleness: NonNegativeInt = 10
    """Maximum staleness in server steps; older updates are refused."""


@dataclass(frozen=True, kw_only=True)
class Streaming(Checked):
    """Settings of streaming DiLoCo: exchange fragments while training goes on.

    Douillard et al. 2025, arXiv 2501.18512. A round is ``local_steps / fragments`` steps long and exchanges one
    fragment, so each fragment's turn comes every ``local_steps`` steps: that of round r is ``r % fragments`` (as
    `arclight.optim.outer.due`).
    """

    fragments: PositiveInt = 4
    """Fragments of the model."""
    overlap: NonNegativeInt = 1
    """Rounds that an exchange may overlap with training; round r starts from the weights of round
    ``r - 1 - overlap``."""
    mix: Fraction = 0.5
    """Share of its own fragment that a client keeps when it merges the server's, in [0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= max(2, self.fragments):
            raise ValueError(f"overlap must be below fragments = {self.fragments}, got {self.overlap}")
