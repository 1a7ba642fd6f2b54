"""Apply differential privacy (DP-FedAvg): clip updates, add noise, account epsilon.

DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963): with every change of norm at most S, a client moves the sum of changes by
at most S, and noise of standard deviation z S on the sum hides it as the Gaussian mechanism of multiplier z does. The privacy
of many rounds is counted in Renyi's terms by Google's ``dp-accounting``.

Noise comes from the operating system's randomness, by ChaCha20. It is added in floating point: an adversary who sees all bits
of the weights could, in principle, use its gaps (Mironov 2012).

`server_run` aggregates and accounts by it if the settings have noise; `executor` clips at the client, and adds noise there with
``by = "clients"`` (`service` orders it). The accounting must never promise more privacy than there is; what rounds have spent is in
their checkpoints (`Ledger.to_table`) and stays readable.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.extras import require
from arclight.federated.aggregation.chunks import ChunkWorkers
from arclight.federated.aggregation.fixed_point import Contribution, Form, measure
from arclight.federated.aggregation.fold import Fold, SinkFactory, WholeTensorSink, emit
from arclight.federated.aggregation.statistics import PREFIX
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.random_stream import KEY_BYTES, add_noise
from arclight.federated.privacy.robust import bounded
from arclight.federated.privacy.settings import Noise, NormBound

if TYPE_CHECKING:
    from arclight.federated.settings import Federation


class BudgetError(FederatedError):
    """A round that would spend more privacy than the settings allow."""


Former = Callable[[str], torch.Tensor]
"""Maps a key to the weights before the round."""


def noisy_fold(settings: Noise, secret: bytes | None = None, former: Former | None = None) -> Callable[..., Fold]:
    """Return the maker of a round's fold, called as `Fold` is.

    secret: 32 bytes for tests; the system's randomness otherwise.

    former: with it variances stay variances, see `clamp_variance`.
    """
    return partial(NoisyFold, settings, secret, former)


def clamp_variance(key: str, mean: torch.Tensor, former: Former) -> torch.Tensor:
    """Clamp a mean change so that no ``running_var`` of a normalisation goes below zero.

    The change is former weights less new ones.

    Values that noise would push there stay as they were. That looks at what has its noise already and at weights that all may see,
    and so costs no privacy.
    """
    if key.rpartition(".")[2] != "running_var":
        return mean
    return torch.where(mean > former(key).to(mean.dtype), 0.0, mean)


class NoisyFold(Fold):
    """Average clipped changes; noise of deviation ``multiplier * clip`` is on their sum.

    With ``by="clients"`` the noise is in the changes already, which are summed as they are. Tensors of integers get none, and
    variances do not go below zero if ``former`` is given (see `clamp_variance`).
    Statistics are those of the changes without the server's noise: what is shown of them is not protected.
    Raises FederatedError if clients weigh differently, send weights, or send anything but ``model/`` tensors.
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
        self._secret, self._former = os.urandom(KEY_BYTES) if secret is None else secret, former
        if settings.by == "server":
            given = bounded(given, NormBound(largest=settings.clip), threads=more.get("threads"))
        super().__init__(given, form, **more)

    def each(self, key: str, workers: ChunkWorkers, into: SinkFactory) -> None:
        if not self._deviation and self._former is None:
            super().each(key, workers, into)
            return
        mean = WholeTensorSink()
        super().each(key, workers, mean)
        if mean.tensor.is_floating_point() and self._deviation:
            add_noise(self._secret, key, mean.tensor, self._deviation / len(self._holders(key)))
        emit(mean.tensor if self._former is None else clamp_variance(key, mean.tensor, self._former), workers, into)


def noise_for_clients(federation: Federation, least: int = 0) -> dict[str, Any]:
    """Return the clients' orders about noise, as JSON values; empty if the server adds it.

    least: updates without which the round does not close, as it was opened.
    """
    if federation.noise is None or federation.noise.by != "clients":
        return {}
    return {"noise": {**asdict(federation.noise), "least": least or expected_updates(federation)}}


def expected_updates(federation: Federation) -> int:
    """Count the updates with which a round closes if all that it wants can be drawn."""
    wanted = federation.sampling.per_round or federation.clients
    return max(1, math.ceil(federation.waiting.quorum * wanted - 1e-9))


def clip_and_add_noise(
    changes: Callable[[], Iterable[tuple[str, torch.Tensor]]], order: Mapping[str, Any], secret: bytes | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a client's changes, clipped to norm ``clip``, with its part of the noise.

    changes: makes them; called twice, first for their norm. order: the table of `noise_for_clients`, whose ``least`` is the number of updates
    with which a round may close: so many parts make the noise that was asked for, more make more.
    """
    settings = Noise(**{name: value for name, value in order.items() if name != "least"})
    norm = math.hypot(*(measure("this client", {key: tensor}).norm("") for key, tensor in changes()))
    clip_factor = min(1.0, settings.clip / norm) if norm else 1.0
    deviation = settings.multiplier * settings.clip / math.sqrt(order["least"])
    secret = os.urandom(KEY_BYTES) if secret is None else secret
    for key, tensor in changes():
        if not key.startswith(PREFIX):
            raise FederatedError(f"noise protects weights only, and {key} is to be sent: leave moments empty")
        if not tensor.is_floating_point():
            yield key, tensor
            continue
        wide = tensor.to(torch.float64) * clip_factor
        add_noise(secret, key, wide, deviation)
        yield key, wide.to(tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One published mean with noise: the privacy spent by one round."""

    multiplier: float
    """Standard deviation of the noise that was on the sum of changes, over the clip."""
    clients: int = 0
    """Clients that the round's were sampled from, if sampling amplifies privacy."""
    drawn: int | None = None
    """How many were drawn, all of whom are in the mean; None: sampling does not amplify privacy."""


class Ledger:
    """Count what rounds have spent, by `Release`; their order does not matter.

    A value: `after` makes another.
    """

    def __init__(self, releases: Mapping[Release, int] | None = None) -> None:
        self.releases: Mapping[Release, int] = dict(releases or {})
        self._composed: tuple[Any, Any] | None = None
        """Two of the library's accountants, once epsilon was requested: a release by chance takes them half a second."""

    def __bool__(self) -> bool:
        return bool(self.releases)

    def after(self, one: Release, times: int = 1) -> Ledger:
        """Return the ledger after ``times`` more rounds."""
        made = Ledger({**self.releases, one: self.releases.get(one, 0) + times})
        if self._composed is not None:
            made._composed = copy.deepcopy(self._composed)
            _compose(made._composed, one, times)
        return made

    def epsilon(self, delta: float) -> float:
        """Compute the epsilon spent at ``delta``.

        How well the weights of all rounds hide whether a client's changes counted or were zero. If a round drew some
        of the clients by chance, without replacement, this protects in return. It is counted as for a client that is
        replaced by another, which moves the sum by up to twice the clip and covers the case above (Wang et al. 2019,
        arXiv 1808.00087). As what holds without any chance holds too, the smaller of both is returned. Raises
        MissingExtraError without dp-accounting.
        """
        if not self.releases:
            return 0.0
        if self._composed is None:
            dp, rdp = require("dp_accounting", extra="privacy"), require("dp_accounting.rdp", extra="privacy")
            replaced = dp.NeighboringRelation.REPLACE_ONE
            self._composed = rdp.RdpAccountant(), rdp.RdpAccountant(neighboring_relation=replaced)
            for one, times in self.releases.items():
                _compose(self._composed, one, times)
        zeroed, replaced = (float(accountant.get_epsilon(delta)) for accountant in self._composed)
        return min(zeroed, replaced) if any(one.drawn is not None for one in self.releases) else zeroed

    def to_table(self) -> list[dict[str, Any]]:
        """Return the releases as JSON values, which a round's checkpoint keeps."""
        return [{**asdict(one), "rounds": times} for one, times in sorted(self.releases.items(), key=repr)]


def _compose(accountants: tuple[Any, Any], one: Release, times: int) -> None:
    dp = require("dp_accounting", extra="privacy")
    zeroed, replaced = accountants
    zeroed.compose(dp.GaussianDpEvent(one.multiplier), times)
    event = dp.GaussianDpEvent(one.multiplier / 2)
    if one.drawn is not None:
        event = dp.SampledWithoutReplacementDpEvent(one.clients, one.drawn, event)
    replaced.compose(event, times)


def spent_before(trees: Mapping[str, Any], number: int) -> Ledger:
    """Return the privacy spent by the rounds up to a checkpoint, also before a fork.

    Checkpoints of older versions do not say it: then each of their rounds counts with the least noise that it can have had.
    """
    if "privacy" in trees:
        return Ledger(
            {
                Release(multiplier=spent["multiplier"], clients=spent["clients"], drawn=spent["drawn"]): spent["rounds"]
                for spent in trees["privacy"]
            }
        )
    settings = trees.get("federation", {}).get("settings", {})
    noise = settings.get("noise")
    if noise is None or number < 1:
        return Ledger()
    parts = 1
    if noise["by"] == "clients":
        parts = math.ceil(settings["waiting"]["quorum"] * (settings["sampling"]["per_round"] or settings["clients"]))
    return Ledger({Release(multiplier=noise["multiplier"] / math.sqrt(max(1, parts))): number})


def privacy_budget(federation: Federation, clients: int) -> Budget | None:
    """Return the privacy budget of a run; None without noise."""
    if federation.noise is None:
        return None
    sampling, waiting = federation.sampling, federation.waiting
    by_chance = sampling.over_provision == 0 and waiting.quorum == 1 and sampling.hours is None
    wanted = min(sampling.per_round or clients, clients)
    return Budget(noise=federation.noise, clients=clients, per_round=wanted, by_chance=by_chance)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Privacy budget: predicts the cost of rounds, and counts what each has cost."""

    noise: Noise
    clients: int
    per_round: int
    """Clients that each round is to take."""
    by_chance: bool = True
    """Whether a round's clients are a sample of the fixed size ``per_round``; they are not if the first to answer are taken."""

    def release(self, multiplier: float, drawn: int, *, all_drawn: bool) -> Release:
        """Return the release of a round.

        all_drawn: just the clients that were drawn first are in it. If others took part in their place, that depends on who could be
        reached, and sampling does not amplify privacy.
        """
        if all_drawn and self.by_chance and self.per_round < self.clients:
            return Release(multiplier=multiplier, clients=self.clients, drawn=drawn)
        return Release(multiplier=multiplier)

    def epsilon(self, rounds: int, before: Ledger | None = None) -> float:
        """Return epsilon after so many planned rounds beyond those ``before``."""
        before = Ledger() if before is None else before
        planned = self.release(self.noise.multiplier, self.per_round, all_drawn=True)
        return (before.after(planned, rounds) if rounds > 0 else before).epsilon(self.noise.delta)

    def rounds(self, most: int, before: Ledger | None = None) -> int:
        """Count how many of ``most`` rounds the settings' epsilon pays for; all without one."""
        bound = self.noise.epsilon
        if bound is None or self.epsilon(most, before) <= bound:
            return most
        low, high = 0, most  # low is paid for, high is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle, before) <= bound else (low, middle)
        return low

    def check(self, rounds: int, before: Ledger | None = None) -> None:
        """Raise BudgetError if so many rounds more would spend more than the settings' epsilon."""
        if self.noise.epsilon is None or rounds < 1 or (spent := self.epsilon(rounds, before)) <= self.noise.epsilon:
            return
        past = f", {sum(before.releases.values())} earlier ones included," if before else ""
        raise BudgetError(
            f"{rounds} rounds would spend epsilon = {spent:.3g}{past} at delta = {self.noise.delta:g}, the budget is "
            f"{self.noise.epsilon:g}: it pays for {self.rounds(rounds, before)} rounds; run fewer, or raise noise.multiplier "
            f"(now {self.noise.multiplier:g}) or noise.epsilon"
        )

    def exceeded(self, ledger: Ledger) -> str | None:
        """Return why a round that spends more than the settings' epsilon must not be published.

        Else None.
        """
        if self.noise.epsilon is None or (spent := ledger.epsilon(self.noise.delta)) <= self.noise.epsilon:
            return None
        return (
            f"it would spend epsilon = {spent:.3g} at delta = {self.noise.delta:g}, the budget is {self.noise.epsilon:g} "
            "(noise.epsilon): the weights of the round before are the run's last. To continue, fork the run from there with a "
            "larger budget or more noise"
        )
