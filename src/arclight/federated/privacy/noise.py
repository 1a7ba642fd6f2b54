"""Differential privacy of whole clients: their changes are clipped, the sum gets Gaussian noise, and what it costs is counted.

DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963): with every change of norm at most S, a client moves the sum of changes by
at most S, and noise of standard deviation z S on the sum hides it as the Gaussian mechanism of multiplier z does. The privacy
of many rounds is counted in Renyi's terms by Google's ``dp-accounting``.

Noise comes from the operating system's randomness, by ChaCha20. It is added in floating point: an adversary who sees all bits
of the weights could, in principle, use its gaps (Mironov 2012).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.extras import require
from arclight.federated.aggregation.chunks import Lanes
from arclight.federated.aggregation.fold import Fold, Into, Whole, hand_over
from arclight.federated.aggregation.scale import Contribution, Form, measure
from arclight.federated.aggregation.statistics import PREFIX
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.robust import bounded
from arclight.federated.privacy.settings import Noise, NormBound
from arclight.federated.privacy.stream import KEY, add_noise

if TYPE_CHECKING:
    from arclight.federated.settings import Federation


class BudgetError(FederatedError):
    """A round that would spend more privacy than the settings allow."""


Former = Callable[[str], torch.Tensor]
"""A key to the weights before the round."""


def folding(settings: Noise, secret: bytes | None = None, former: Former | None = None) -> Callable[..., Fold]:
    """What makes the fold of a round, called as `Fold` is. ``secret``: 32 bytes for tests; the system's randomness otherwise.

    former: with it variances stay variances, see `held`.
    """
    return partial(NoisyFold, settings, secret, former)


def held(key: str, mean: torch.Tensor, former: Former) -> torch.Tensor:
    """A mean change (former weights less new ones) with which no variance of a normalisation (``running_var``) goes below zero.

    Values that noise would push there stay as they were. That looks at what has its noise already and at weights that all may see,
    and so costs no privacy.
    """
    if key.rpartition(".")[2] != "running_var":
        return mean
    return torch.where(mean > former(key).to(mean.dtype), 0.0, mean)


class NoisyFold(Fold):
    """The mean of clipped changes with noise, of standard deviation ``multiplier * clip`` on their sum.

    With ``by="clients"`` the noise is in the changes already, which are summed as they are. Tensors of integers get none, and
    variances do not go below zero (see `held`).
    Statistics are those of the changes without the server's noise: what is shown of them is not protected.
    Raises FederatedError where clients weigh differently, send weights, or send anything but ``model/`` tensors.
    """

    def __init__(
        self,
        settings: Noise,
        secret: bytes | None,
        former: Former | None,
        contributions: Iterable[Contribution],
        form: Form = "delta",
        *,
        scales: Any = None,
        **more: Any,
    ) -> None:
        given = list(contributions)
        if form != "delta":
            raise FederatedError('noise is for changes: set send = "delta"')
        if len({one.weight for one in given}) > 1:
            raise FederatedError('with noise all clients must weigh the same: set weigh_by = "equal"')
        if strange := sorted(key for one in given for key in one.keys if not key.startswith(PREFIX)):
            raise FederatedError(f"noise protects weights only, and {strange[0]} was sent: leave moments empty")
        self._deviation = settings.multiplier * settings.clip if settings.by == "server" else 0.0
        self._secret, self._former = os.urandom(KEY) if secret is None else secret, former
        if settings.by == "server":
            given = bounded(given, NormBound(largest=settings.clip), threads=more.get("threads"))
        super().__init__(given, form, **more)

    def each(self, key: str, among: Lanes, into: Into) -> None:
        if not self._deviation and self._former is None:
            super().each(key, among, into)
            return
        mean = Whole()
        super().each(key, among, mean)
        if mean.tensor.is_floating_point() and self._deviation:
            add_noise(self._secret, key, mean.tensor, self._deviation / len(self._holders(key)))
        hand_over(mean.tensor if self._former is None else held(key, mean.tensor, self._former), among, into)


def order(federation: Federation) -> dict[str, Any]:
    """What clients are told to do about noise, as JSON values; nothing where it is the server's business."""
    if federation.noise is None or federation.noise.by != "clients":
        return {}
    wanted = federation.sampling.per_round or federation.clients
    return {"noise": {**asdict(federation.noise), "least": max(1, math.ceil(federation.waiting.quorum * wanted))}}


def protect(
    changes: Callable[[], Iterable[tuple[str, torch.Tensor]]], asked: Mapping[str, Any], secret: bytes | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A client's changes with their norm at most ``clip`` and its part of the noise, tensor by tensor.

    changes: makes them; called twice, first for their norm. asked: as `order` gave it. ``least`` of it is the number of updates
    with which a round may close: so many parts make the noise that was asked for, more make more.
    """
    settings = Noise(**{name: value for name, value in asked.items() if name != "least"})
    norm = math.hypot(*(measure("this client", {key: tensor}).norm("") for key, tensor in changes()))
    shrink = min(1.0, settings.clip / norm) if norm else 1.0
    deviation = settings.multiplier * settings.clip / math.sqrt(asked["least"])
    secret = os.urandom(KEY) if secret is None else secret
    for key, tensor in changes():
        if not key.startswith(PREFIX):
            raise FederatedError(f"noise protects weights only, and {key} is to be sent: leave moments empty")
        if not tensor.is_floating_point():
            yield key, tensor
            continue
        wide = tensor.to(torch.float64) * shrink
        add_noise(secret, key, wide, deviation)
        yield key, wide.to(tensor.dtype)


def budget(federation: Federation, clients: int) -> Budget | None:
    """What a run's noise is counted by; None without noise."""
    if federation.noise is None:
        return None
    sampling, waiting = federation.sampling, federation.waiting
    by_chance = sampling.over_provision == 0 and waiting.quorum == 1 and sampling.hours is None
    wanted = min(sampling.per_round or clients, clients)
    return Budget(noise=federation.noise, clients=clients, per_round=wanted, by_chance=by_chance)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What rounds cost: how well the weights of all rounds hide whether a client's changes counted or were zero.

    Where a round draws some of the clients by chance, without replacement, this protects in return. It is counted as for a
    client that is replaced by another, which moves the sum by up to twice the clip and covers the case above (Wang et al.
    2019, arXiv 1808.00087). As what holds without any chance holds too, the smaller of both is told.
    """

    noise: Noise
    clients: int
    per_round: int
    """Clients of each round; of chance only if a round takes all those that it draws."""
    by_chance: bool = True
    """Whether those of a round are a sample of the fixed size ``per_round``; not so if the first to answer are taken."""

    def epsilon(self, rounds: int) -> float:
        """Spent after so many rounds, at the settings' delta. Raises MissingExtraError without dp-accounting."""
        if rounds < 1:
            return 0.0
        dp = require("dp_accounting", extra="privacy")
        rdp = require("dp_accounting.rdp", extra="privacy")
        plain = rdp.RdpAccountant()
        plain.compose(dp.GaussianDpEvent(self.noise.multiplier), rounds)
        found = float(plain.get_epsilon(self.noise.delta))
        if not self.by_chance or self.per_round >= self.clients:
            return found
        sampled = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        event = dp.GaussianDpEvent(self.noise.multiplier / 2)
        sampled.compose(dp.SampledWithoutReplacementDpEvent(self.clients, self.per_round, event), rounds)
        return min(found, float(sampled.get_epsilon(self.noise.delta)))

    def rounds(self, most: int) -> int:
        """How many of ``most`` rounds the settings' epsilon pays for; all without one."""
        if self.noise.epsilon is None or self.epsilon(most) <= self.noise.epsilon:
            return most
        low, high = 0, most  # low is paid for, high is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= self.noise.epsilon else (low, middle)
        return low

    def check(self, rounds: int) -> None:
        """Raises BudgetError where so many rounds, from the first of the run on, would spend more than the settings' epsilon."""
        if self.noise.epsilon is not None and (spent := self.epsilon(rounds)) > self.noise.epsilon:
            raise BudgetError(
                f"{rounds} rounds would spend epsilon = {spent:.3g} at delta = {self.noise.delta:g}, the budget is "
                f"{self.noise.epsilon:g}: it pays for {self.rounds(rounds)} rounds; run fewer, or raise noise.multiplier "
                f"(now {self.noise.multiplier:g}) or noise.epsilon"
            )
