"""Who takes part in a round and how long is waited (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hours:
    """Clients that can be reached at certain hours of their day only, as telephones that are charged at night."""

    per_round: float = 1.0
    """Hours that a round stands for: round r is drawn at hour r times this."""
    length: float = 8.0
    """Hours a day at which a client can be reached, in (0, 24]; when they begin differs from client to client."""
    outside: float = 0.0
    """Chance that a client answers at another hour, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.length <= 24 or not 0 <= self.outside <= 1 or self.per_round < 0:
            raise ValueError(f"hours need a length in (0, 24] and a chance in [0, 1], got {self}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which clients take part in a round; drawn from the run's seed and the round's number, so a resumed run draws the same."""

    per_round: int | None = None
    """Clients of each round; none: all."""
    over_provision: float = 0.0
    """Further clients that are asked, as a share of those wanted: the round takes the first that answer."""
    dropout: float = 0.0
    """Share of the drawn clients that are left out, to see what dropouts do, in [0, 1)."""
    hours: Hours | None = None
    """Dropouts that depend on the client: its hours of the day."""

    def __post_init__(self) -> None:
        if self.per_round is not None and self.per_round < 1:
            raise ValueError(f"a round needs at least one client, got per_round = {self.per_round}")
        if self.over_provision < 0 or not 0 <= self.dropout < 1:
            raise ValueError(
                f"over_provision must not be negative and dropout lies in [0, 1), got {self.over_provision} and {self.dropout}"
            )


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long a round waits for whom. Durations in seconds."""

    quorum: float = 1.0
    """Share of the wanted updates with which a round may close, in (0, 1]."""
    grace: float = 0.0
    """Once there is a quorum, how long others may still arrive."""
    deadline: float | None = None
    """After this a round closes with a quorum or fails without one; none waits as long as nodes are alive and get on."""
    join: float = 300.0
    """How long to wait for nodes before the first round, and after all have gone."""
    nodes: int = 1
    """Nodes to wait for before the first round."""
    beat_every: float = 0.5
    """Nodes say that they are alive this often; one that is silent three times as long is lost."""
    lease: float = 15.0
    """How long a lost node's begun work is kept for it: one that is restarted goes on where it was. Then another node takes it,
    or, where only that node has the data, the round goes on without."""
    stall: float = 1800.0
    """A node that is alive but has done no step and sent nothing for as long counts as lost."""
    attempts: int = 3
    """How often one client is asked in a round if its failures may pass (a full disk, a damaged upload)."""
    retries: int = 1
    """How often a round that did not reach its quorum asks other or returned clients, or one whose secure sum could not be opened
    its own, before the run ends."""

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ValueError(f"a quorum is a share in (0, 1], got {self.quorum}")
        if self.beat_every <= 0 or self.join <= 0 or self.stall <= 0 or self.grace < 0 or self.lease < 0:
            raise ValueError(f"beat_every, join and stall must be positive, grace and lease not negative: {self}")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"a deadline must be positive, got {self.deadline}")
        if self.nodes < 1 or self.attempts < 1 or self.retries < 0:
            raise ValueError(f"nodes and attempts must be at least 1, retries at least 0: {self}")

    @property
    def silence(self) -> float:
        """Seconds after which a node that says nothing is lost."""
        return 3 * self.beat_every


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """Asynchronous rounds (FedBuff, Nguyen et al. 2022): step whenever ``size`` updates have come, stale ones weighing less."""

    size: int = 10
    """Updates per server step."""
    most_stale: int = 10
    """Older updates, in server steps, are refused."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.most_stale < 0:
            raise ValueError(
                f"a buffer holds at least one update, none of negative age: got {self.size}, {self.most_stale}"
            )


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Exchange in fragments while training goes on (streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512).

    A round is ``local_steps / fragments`` steps long and exchanges one fragment, so each fragment's turn comes every
    ``local_steps`` steps: that of round r is ``r % fragments`` (as `arclight.optim.outer.due`).
    """

    fragments: int = 4
    """Parts that a model is exchanged in."""
    overlap: int = 1
    """Rounds during which an exchange may be under way while clients train on; round r begins from the weights of round
    ``r - 1 - overlap``."""
    mix: float = 0.5
    """What a client keeps of its own fragment when the server's arrives, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.fragments < 1 or not 0 <= self.overlap < max(2, self.fragments) or not 0 <= self.mix <= 1:
            raise ValueError(
                f"fragments >= 1, an overlap below the number of fragments and a mix in [0, 1] are needed: {self}"
            )
