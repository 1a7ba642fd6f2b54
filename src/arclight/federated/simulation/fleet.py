"""Define a fleet's links, speeds and failures, and sample its clients, without torch.

`simulate` takes a `Fleet`, `simulator` draws each client's device and the fate of its rounds from it. A client depends on seed and number alone, so
that of a million clients only those that are drawn cost time. Field names are public; the order of draws decides seeded simulations.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from arclight._intervals import (
    Checked,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    former_names,
)
from arclight.data.permutation import keys_of
from arclight.federated.coordination.events import FitPlan
from arclight.federated.protocol import ActiveWork


@former_names(latency="latency_s")
@dataclass(frozen=True, kw_only=True)
class Links(Checked):
    """Clients' lines.

    A client's rates are the median times exp(spread z) with z of the standard normal distribution, drawn once.
    """

    up: PositiveFloat = 20e6
    """Median rate to the server, bits per second."""
    down: PositiveFloat = 100e6
    """Median rate from the server, bits per second."""
    latency_s: NonNegativeFloat = 0.04
    """Time from one end to the other, for every message and transfer."""
    spread: NonNegativeFloat = 0.0
    """Spread of rates between clients; at 0.5 one in three differs by a factor of 1.6 or more."""


@former_names(step="step_s", measured="measured_s", start="overhead_s", evaluate="evaluation_s")
@dataclass(frozen=True, kw_only=True)
class Speeds(Checked):
    """Clients' training speeds."""

    step_s: PositiveFloat = 0.1
    """Median time of an optimizer step."""
    measured_s: tuple[PositiveFloat, ...] = ()
    """Times of a step as measured on some clients: each client has one of them, instead of ``step_s`` and ``spread``."""
    spread: NonNegativeFloat = 0.0
    """Spread between clients, like that of links."""
    jitter: NonNegativeFloat = 0.0
    """Spread between a client's rounds, like that of links."""
    overhead_s: NonNegativeFloat = 0.0
    """Time of a client's round besides steps and transfers: decoding, binding weights, encoding."""
    stragglers: Fraction = 0.0
    """Share of the clients' rounds that are slowed down by others' work on the same machine."""
    slowdown: Annotated[float, Interval(ge=1, lt=math.inf)] = 5.0
    """Factor by which it is slower."""
    evaluation_s: NonNegativeFloat = 0.0
    """Time of an evaluation."""


@former_names(round="round_s")
@dataclass(frozen=True, kw_only=True)
class Costs(Checked):
    """A server's costs.

    The defaults are of two cores of a common server; `server_costs.measure_costs` gives those of this machine.
    """

    check: NonNegativeFloat = 1.5e-9
    """Seconds per byte of an update that arrives: hashing, writing, checking values."""
    fold: NonNegativeFloat = 2.5e-9
    """Seconds per byte of a contributor's decoded tensors."""
    step: NonNegativeFloat = 8e-9
    """Seconds per byte of the model: server step, and the round's checkpoint on disk."""
    round_s: NonNegativeFloat = 0.02
    """Further time per round."""
    threads: PositiveInt = 4
    """Updates that are checked at the same time."""
    rate: PositiveFloat = 10e9
    """Bits per second of the server's own line, each way, which all clients share."""


@dataclass(frozen=True, kw_only=True)
class Fleet(Checked):
    """A simulated fleet and its server."""

    links: Links = field(default_factory=Links)
    speeds: Speeds = field(default_factory=Speeds)
    costs: Costs = field(default_factory=Costs)
    vanish: Fraction = 0.0
    """Chance that a client falls silent for good in a round that it has begun, at any moment of it alike."""
    fail: Fraction = 0.0
    """Chance that a client says, at the end of its steps, that it could not."""
    connected: NonNegativeInt = 10_000
    """Fleets of at most as many clients stay connected; in larger ones a client connects when it is drawn."""


@dataclass(slots=True)
class SimulatedJob:
    """A round that a client works on."""

    plan: FitPlan
    down: int
    started_at: float = math.inf
    ended_at: float = math.inf
    cancelled: bool = False


@dataclass(slots=True)
class Device:
    """A client that is connected, or was."""

    name: str
    up: float
    down: float
    step_s: float
    session: str = ""
    asking: bool = False
    gone: bool = False
    """It has fallen silent."""
    has: int = -1
    """The round whose weights it has; -1: none."""
    worker: float = 0.0
    """Time at which its worker is free."""
    line: float = 0.0
    """Time at which its line to the server is free."""
    beats: int = 0
    jobs: dict[int, SimulatedJob] = field(default_factory=dict)

    def active_work(self) -> tuple[ActiveWork, ...]:
        """Return the work as nodes report it; time that passes counts as progress."""
        return tuple(ActiveWork(client=self.name, round=round, steps=self.beats) for round in self.jobs)


class FleetSampler:
    """Sample each client's device, and the fate of each of its rounds: a function of the seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._seed = fleet, seed % 2**63

    def device(self, index: int, name: str) -> Device:
        draw = self._draw(index, 0)
        links, speeds = self._fleet.links, self._fleet.speeds
        up, down, slow = draw.standard_normal(3)
        step = speeds.step_s * math.exp(speeds.spread * slow)
        if speeds.measured_s:
            step = speeds.measured_s[int(draw.integers(len(speeds.measured_s)))]
        return Device(name, links.up * math.exp(links.spread * up), links.down * math.exp(links.spread * down), step)

    def fit_seconds(self, device: Device, index: int, plan: FitPlan) -> float:
        draw, speeds = self._draw(index, 2 * plan.round + 1), self._fleet.speeds
        slow = speeds.slowdown if draw.random() < speeds.stragglers else 1.0
        return speeds.overhead_s + plan.steps * device.step_s * slow * math.exp(speeds.jitter * draw.standard_normal())

    def fate(self, index: int, round: int) -> tuple[float | None, bool]:
        """Return when in its work a client falls silent (a fraction, or None), and if it fails."""
        draw = self._draw(index, 2 * round + 2)
        vanishes, when, fails = draw.random(3)
        return (float(when) if vanishes < self._fleet.vanish else None), bool(fails < self._fleet.fail)

    def _draw(self, index: int, what: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(int(keys_of(self._seed, index, what)[0])))


class Pipe:
    """Share a line among transfers, first come first served, each no faster than its own end."""

    def __init__(self, rate: float) -> None:
        """Initialise an idle pipe.

        rate: bits per second.
        """
        self._rate, self._free = rate, 0.0

    def send(self, now: float, bytes: int, rate: float) -> float:
        """Return the time at which a transfer that begins now is through.

        ``rate``: the client's, bits/s.
        """
        self._free = max(self._free, now) + 8 * bytes / self._rate
        return max(self._free, now + 8 * bytes / rate)


class Cores:
    """Run work on a number of threads, first come first served."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self.busy = 0.0

    def work(self, now: float, seconds: float) -> float:
        """Return the time at which work that comes now is done."""
        done = max(heapq.heappop(self._free), now) + seconds
        heapq.heappush(self._free, done)
        self.busy += seconds
        return done
