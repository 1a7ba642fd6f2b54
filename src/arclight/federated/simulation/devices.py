"""A simulated client: its rates, and where it is in its rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from arclight.data.permutation import keys_of
from arclight.federated.coordination.events import FitPlan
from arclight.federated.protocol import Doing
from arclight.federated.simulation.settings import Fleet


@dataclass(slots=True)
class Job:
    """A round that a client is at."""

    plan: FitPlan
    down: int
    begun: float = math.inf
    ended: float = math.inf
    cancelled: bool = False


@dataclass(slots=True)
class Device:
    """A client that is connected, or was."""

    name: str
    up: float
    down: float
    step: float
    session: str = ""
    asking: bool = False
    gone: bool = False
    """It has fallen silent."""
    has: int = -1
    """The round whose weights it has; -1: none."""
    worker: float = 0.0
    """When its worker is free."""
    line: float = 0.0
    """When its line to the server is."""
    beats: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)

    def doing(self) -> tuple[Doing, ...]:
        """As nodes say it; that time goes by is progress."""
        return tuple(Doing(client=self.name, round=round, steps=self.beats) for round in self.jobs)


class Nature:
    """What chance has given to each client, and to each of its rounds: a function of the seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._seed = fleet, seed % 2**63

    def device(self, index: int, name: str) -> Device:
        draw = self._draw(index, 0)
        links, speeds = self._fleet.links, self._fleet.speeds
        up, down, slow = draw.standard_normal(3)
        step = speeds.step * math.exp(speeds.spread * slow)
        if speeds.measured:
            step = speeds.measured[int(draw.integers(len(speeds.measured)))]
        return Device(name, links.up * math.exp(links.spread * up), links.down * math.exp(links.spread * down), step)

    def fit_seconds(self, device: Device, index: int, plan: FitPlan) -> float:
        draw, speeds = self._draw(index, 2 * plan.round + 1), self._fleet.speeds
        slow = speeds.slowdown if draw.random() < speeds.stragglers else 1.0
        return speeds.start + plan.steps * device.step * slow * math.exp(speeds.jitter * draw.standard_normal())

    def fate(self, index: int, round: int) -> tuple[float | None, bool]:
        """At which part of its work a client falls silent, if it does, and whether it fails otherwise."""
        draw = self._draw(index, 2 * round + 2)
        vanishes, when, fails = draw.random(3)
        return (float(when) if vanishes < self._fleet.vanish else None), bool(fails < self._fleet.fail)

    def _draw(self, index: int, what: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(int(keys_of(self._seed, index, what)[0])))
