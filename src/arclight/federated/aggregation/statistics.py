"""Measure a round's updates: norms, cosines with the mean (client drift), noise scale.

`fold` and robust means build them while they read updates, `strategy_step` and `server_step` pass them on, `server_run` records them. Only
keys that begin with `PREFIX` count in totals: parameters and buffers of the model, not states of optimizers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PREFIX = "model/"
"""Keys that count for norms over all tensors; moments have units of their own."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one round; norms are L2.

    Only ``model/`` keys of floating point count, but for ``norm_by_key`` and ``norms_by_key``.
    """

    norm: float
    """L2 norm of the mean change."""
    norms: dict[str, float]
    """L2 norm of each contributor's change."""
    cosines: dict[str, float]
    """Cosine of each contributor's change with the mean: client drift. Contributors without a change have none."""
    norm_by_key: dict[str, float]
    """L2 norm of the mean change of each tensor."""
    norms_by_key: dict[str, dict[str, float]]
    """Key to contributor to norm."""
    noise_scale: float | None
    """Simple noise scale in samples; None if it cannot be estimated. See `noise_scale`."""


class Contributor(NamedTuple):
    """A contributor, its weight, and its samples if known."""

    client: str
    weight: float
    samples: float | None


@dataclass
class StatisticsBuilder:
    """Collect norms and cosines key by key."""

    contributors: Sequence[Contributor]
    by_key: dict[str, dict[str, float]] = field(default_factory=dict)
    mean_by_key: dict[str, float] = field(default_factory=dict)
    cosine_by_key: dict[str, dict[str, float]] = field(default_factory=dict)

    def counts(self, key: str) -> bool:
        return key.startswith(PREFIX)

    def client(self, key: str, client: str, norm: float) -> None:
        self.by_key.setdefault(key, {})[client] = min(norm, sys.float_info.max)

    def mean(self, key: str, norm: float) -> None:
        self.mean_by_key[key] = min(norm, sys.float_info.max)

    def product(self, key: str, client: str, cosine: float) -> None:
        """Record the cosine of one contributor with the mean, of one key."""
        self.cosine_by_key.setdefault(key, {})[client] = cosine

    def statistics(self) -> Statistics:
        means = {key: norm for key, norm in self.mean_by_key.items() if self.counts(key)}
        norms = {
            contributor.client: math.hypot(*(of[contributor.client] for of in found if contributor.client in of))
            for contributor in self.contributors
            if (found := [self.by_key[key] for key in means if key in self.by_key])
        }
        return Statistics(
            norm=math.hypot(*means.values()),
            norms=norms,
            cosines={
                contributor.client: c
                for contributor in self.contributors
                if (c := self._cosine(contributor.client, norms)) is not None
            },
            norm_by_key=dict(self.mean_by_key),
            norms_by_key={key: dict(norms) for key, norms in self.by_key.items()},
            noise_scale=self._noise(list(means)),
        )

    def _cosine(self, client: str, norms: dict[str, float]) -> float | None:
        """Return the cosine of a contributor with the mean, over the contributor's keys."""
        keys = [key for key, of in self.cosine_by_key.items() if client in of]
        common = math.hypot(*(self.mean_by_key[key] for key in keys))
        if not keys or not norms[client] or not common:
            return None
        shares = (
            self.cosine_by_key[key][client]
            * (self.by_key[key][client] / norms[client])
            * (self.mean_by_key[key] / common)
            for key in keys
        )
        return max(-1.0, min(1.0, math.fsum(shares)))

    def _noise(self, keys: list[str]) -> float | None:
        shared = [key for key in keys if len(self.by_key.get(key, ())) == len(self.contributors)]
        norms = [
            math.hypot(*(self.by_key[key][contributor.client] for key in shared)) for contributor in self.contributors
        ]
        return noise_scale(
            norms,
            math.hypot(*(self.mean_by_key[key] for key in shared)),
            weights=[contributor.weight for contributor in self.contributors],
            samples=[
                contributor.weight if contributor.samples is None else contributor.samples
                for contributor in self.contributors
            ],
        )


def noise_scale(
    norms: Sequence[float], mean_norm: float, *, weights: Sequence[float], samples: Sequence[float]
) -> float | None:
    """Return the simple noise scale tr(S) / |G|^2 in samples (McCandlish et al. 2018).

    arXiv 1812.06162, A.1. Each client's change is one estimate of the gradient G with the variance of its ``samples``;
    with the shares p of the weights, E sum p |g|^2 = |G|^2 + tr(S) sum p/b and E |mean|^2 = |G|^2 + tr(S) sum p^2/b,
    which gives unbiased estimates of both (the paper's, if all weigh the same). None for fewer than two clients, or if
    the estimate of |G|^2 is not positive.
    """
    if len(norms) < 2 or min(samples) <= 0 or mean_norm <= 0:
        return None
    together = math.fsum(weights)
    shares = [weight / together for weight in weights]
    own_share = math.fsum(p / b for p, b in zip(shares, samples, strict=True))
    joint = math.fsum(p * p / b for p, b in zip(shares, samples, strict=True))
    ratios = [norm / mean_norm for norm in norms]  # both estimates in units of |mean|^2
    spread = math.fsum(p * ratio * ratio for p, ratio in zip(shares, ratios, strict=True)) - 1
    variance = spread / (own_share - joint)
    signal = 1 - variance * joint
    if not (signal > 0 and math.isfinite(variance)):
        return None
    return max(0.0, variance / signal)
