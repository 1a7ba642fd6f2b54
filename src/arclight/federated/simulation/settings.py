"""Links, speeds and failures of a simulated fleet (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Links:
    """Clients' lines. A client's rates are the median times exp(spread z) with z of the standard normal distribution, drawn once."""

    up: float = 20e6
    """Median rate to the server, bits per second."""
    down: float = 100e6
    """Median rate from the server, bits per second."""
    latency: float = 0.04
    """Seconds from one end to the other, for every message and transfer."""
    spread: float = 0.0
    """Of rates between clients; 0.5 is a factor of 1.6 for one in three."""

    def __post_init__(self) -> None:
        if self.up <= 0 or self.down <= 0 or self.latency < 0 or self.spread < 0:
            raise ValueError(f"rates must be positive, latency and spread not negative: {self}")


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How long clients take for a step of training."""

    step: float = 0.1
    """Median seconds per optimizer step."""
    measured: tuple[float, ...] = ()
    """Seconds per step as measured on some clients: each client has one of them, instead of ``step`` and ``spread``."""
    spread: float = 0.0
    """Between clients, as that of links."""
    jitter: float = 0.0
    """Between a client's rounds, as that of links."""
    start: float = 0.0
    """Seconds of a client's round besides steps and transfers: decoding, binding weights, encoding."""
    stragglers: float = 0.0
    """Share of the clients' rounds that are slowed down by others' work on the same machine."""
    slowdown: float = 5.0
    """By which factor."""
    evaluate: float = 0.0
    """Seconds of an evaluation."""

    def __post_init__(self) -> None:
        if self.step <= 0 or any(step <= 0 for step in self.measured):
            raise ValueError(f"steps must take time, got {self.step} and {self.measured[:10]}")
        if min(self.spread, self.jitter, self.start, self.evaluate) < 0 or self.slowdown < 1:
            raise ValueError(f"spread, jitter, start and evaluate must not be negative, slowdown at least 1: {self}")
        if not 0 <= self.stragglers <= 1:
            raise ValueError(f"stragglers are a share in [0, 1], got {self.stragglers}")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a server takes for its work. The defaults are of two cores of a common server; `measuring.measured_costs`
    gives those of this machine.
    """

    check: float = 1.5e-9
    """Seconds per byte of an update that arrives: hashing, writing, checking values."""
    fold: float = 2.5e-9
    """Seconds per byte of a contributor's decoded tensors."""
    step: float = 8e-9
    """Seconds per byte of the model: server step, and the round's checkpoint on disk."""
    round: float = 0.02
    """Seconds per round besides."""
    threads: int = 4
    """Updates that are checked at the same time."""
    rate: float = 10e9
    """Bits per second of the server's own line, each way, which all clients share."""

    def __post_init__(self) -> None:
        if min(self.check, self.fold, self.step, self.round) < 0 or self.threads < 1 or self.rate <= 0:
            raise ValueError(f"costs must not be negative, threads at least 1, the rate positive: {self}")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A simulated world."""

    links: Links = field(default_factory=Links)
    speeds: Speeds = field(default_factory=Speeds)
    costs: Costs = field(default_factory=Costs)
    vanish: float = 0.0
    """Chance that a client falls silent for good in a round that it has begun, at any moment of it alike."""
    fail: float = 0.0
    """Chance that a client says, at the end of its steps, that it could not."""
    connected: int = 10_000
    """Fleets of at most as many clients stay connected; in larger ones a client connects when it is drawn."""

    def __post_init__(self) -> None:
        if not 0 <= self.vanish <= 1 or not 0 <= self.fail <= 1 or self.connected < 0:
            raise ValueError(f"vanish and fail are chances in [0, 1]: {self}")
