"""Links, speeds and failures of a simulated fleet (no torch here)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from arclight._intervals import (
    Checked,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, kw_only=True)
class Links(Checked):
    """Clients' lines. A client's rates are the median times exp(spread z) with z of the standard normal distribution, drawn once."""

    up: PositiveFloat = 20e6
    """Median rate to the server, bits per second."""
    down: PositiveFloat = 100e6
    """Median rate from the server, bits per second."""
    latency: NonNegativeFloat = 0.04
    """Seconds from one end to the other, for every message and transfer."""
    spread: NonNegativeFloat = 0.0
    """Of rates between clients; 0.5 is a factor of 1.6 for one in three."""


@dataclass(frozen=True, kw_only=True)
class Speeds(Checked):
    """How long clients take for a step of training."""

    step: PositiveFloat = 0.1
    """Median seconds per optimizer step."""
    measured: tuple[PositiveFloat, ...] = ()
    """Seconds per step as measured on some clients: each client has one of them, instead of ``step`` and ``spread``."""
    spread: NonNegativeFloat = 0.0
    """Between clients, as that of links."""
    jitter: NonNegativeFloat = 0.0
    """Between a client's rounds, as that of links."""
    start: NonNegativeFloat = 0.0
    """Seconds of a client's round besides steps and transfers: decoding, binding weights, encoding."""
    stragglers: Fraction = 0.0
    """Share of the clients' rounds that are slowed down by others' work on the same machine."""
    slowdown: Annotated[float, Interval(ge=1, lt=math.inf)] = 5.0
    """By which factor."""
    evaluate: NonNegativeFloat = 0.0
    """Seconds of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Costs(Checked):
    """What a server takes for its work. The defaults are of two cores of a common server; `measuring.measured_costs`
    gives those of this machine.
    """

    check: NonNegativeFloat = 1.5e-9
    """Seconds per byte of an update that arrives: hashing, writing, checking values."""
    fold: NonNegativeFloat = 2.5e-9
    """Seconds per byte of a contributor's decoded tensors."""
    step: NonNegativeFloat = 8e-9
    """Seconds per byte of the model: server step, and the round's checkpoint on disk."""
    round: NonNegativeFloat = 0.02
    """Seconds per round besides."""
    threads: PositiveInt = 4
    """Updates that are checked at the same time."""
    rate: PositiveFloat = 10e9
    """Bits per second of the server's own line, each way, which all clients share."""


@dataclass(frozen=True, kw_only=True)
class Fleet(Checked):
    """A simulated world."""

    links: Links = field(default_factory=Links)
    speeds: Speeds = field(default_factory=Speeds)
    costs: Costs = field(default_factory=Costs)
    vanish: Fraction = 0.0
    """Chance that a client falls silent for good in a round that it has begun, at any moment of it alike."""
    fail: Fraction = 0.0
    """Chance that a client says, at the end of its steps, that it could not."""
    connected: NonNegativeInt = 10_000
    """Fleets of at most as many clients stay connected; in larger ones a client connects when it is drawn."""
