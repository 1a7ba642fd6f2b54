"""Who takes part in a round and how long is waited (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which clients take part in a round; drawn from the run's seed and the round's number, so a resumed run draws the same."""

    per_round: int | None = None
    """Clients of each round; none: all."""
    over_provision: float = 0.0
    """Further clients that are asked, as a share of those wanted: the round takes the first that answer."""
    dropout: float = 0.0
    """Share of the drawn clients that are left out, to see what dropouts do, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long a round waits for whom. Durations in seconds."""

    quorum: float = 1.0
    """Share of the wanted updates with which a round may close, in (0, 1]."""
    grace: float = 0.0
    """Once there is a quorum, how long others may still arrive."""
    deadline: float | None = None
    """After this a round closes with a quorum or fails without one; none waits as long as nodes are alive."""
    join: float = 300.0
    """How long to wait for nodes before the first round, and after all have gone."""
    beat_every: float = 0.5
    """Nodes say that they are alive this often; one that is silent three times as long is lost."""


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """Asynchronous rounds (FedBuff, Nguyen et al. 2022): step whenever ``size`` updates have come, stale ones weighing less."""

    size: int = 10
    """Updates per server step."""
    most_stale: int = 10
    """Older updates, in server steps, are refused."""
