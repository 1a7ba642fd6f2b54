"""Define the settings of robust means, secure sums and noise, without torch.

A federation's settings hold these; `robust`, `noise` and `secure_aggregation` carry them out. Names of kinds and fields are in recipes, orders
and checkpoints: they stay. A changed default changes what a run protects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arclight._intervals import Checked, Interval, NonNegativeInt, PositiveFloat, PositiveInt, former_names


@dataclass(frozen=True, kw_only=True)
class Median:
    """The coordinate-wise median of the clients' updates (Yin et al. 2018, arXiv 1803.01498).

    Clients weigh the same.
    """


@dataclass(frozen=True, kw_only=True)
class Trimmed(Checked):
    """The coordinate-wise trimmed mean of the clients' updates (Yin et al. 2018).

    Clients weigh the same.
    """

    share: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1
    """Share of the clients trimmed at each end (rounded down), in [0, 0.5)."""


@dataclass(frozen=True, kw_only=True)
class Krum(Checked):
    """Average the updates that lie closest to others (Blanchard et al. 2017, arXiv 1703.02757)."""

    byzantine: NonNegativeInt = 1
    """Number of Byzantine clients tolerated; a round needs at least 2 byzantine + 3 updates."""
    keep: PositiveInt = 1
    """Number of updates averaged; more than one is Multi-Krum."""


@dataclass(frozen=True, kw_only=True)
class NormBound(Checked):
    """Updates are clipped to a maximum norm (Sun et al. 2019, arXiv 1911.07963)."""

    largest: PositiveFloat | None = None
    """Maximum L2 norm of an update; none takes ``times`` the median of the round's norms."""
    times: PositiveFloat = 1.0
    """Multiple of the median norm, if ``largest`` is not given."""


Robust = Median | Trimmed | Krum | NormBound
"""Robust means: a few Byzantine clients move them by a bounded amount, whatever they send."""


@dataclass(frozen=True, kw_only=True)
class Noise(Checked):
    """Client-level differential privacy (DP-FedAvg, McMahan et al. 2018, arXiv 1710.06963).

    Changes are clipped, their sum gets noise.

    Every client weighs the same. What is protected is whether a client took part, from anyone who sees the weights of all rounds;
    norms, metrics and who took part are not.
    """

    clip: PositiveFloat
    """L2 norm to which a client's update is clipped, over all of its tensors."""
    multiplier: PositiveFloat
    """Standard deviation of the noise on the sum of updates, divided by ``clip``."""
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    """Probability with which epsilon may not hold; below one over the number of clients."""
    epsilon: PositiveFloat | None = None
    """Budget: no round is published that would exceed it. None: no bound, epsilon is only reported."""
    by: str = "server"
    """Place where noise is added: "server" (which sees the updates), or "clients", each a share of the variance of their sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in ("server", "clients"):
            raise ValueError(f'noise is added by "server" or "clients", got {self.by!r}')


@former_names(patience="step_timeout_s", most_weight="max_weight")
@dataclass(frozen=True, kw_only=True)
class SecureSum(Checked):
    """The server learns the sum of updates and no single one.

    Bonawitz et al. 2017; Bell et al. 2020, eprint 2020/704.
    """

    threshold: Annotated[float, Interval(gt=0.5, le=1)] = 0.67
    """Share of a client and its partners that must survive the round, in (0.5, 1]: with fewer the sum cannot be unmasked."""
    partners: Annotated[int, Interval(ge=2)] | None = None
    """Number of clients with which each client shares masks; none: all of the round. An even number of about 2 log2 of the clients is enough for thousands."""
    largest: PositiveFloat = 8.0
    """Maximum magnitude of an update's values; larger ones are clipped and counted."""
    step_timeout_s: PositiveFloat = 120.0
    """Time to wait for the other clients at each step of the protocol, once the first has reached it."""
    max_weight: PositiveInt = 1 << 20
    """Maximum weight of a client (samples, tokens); a client with more fails. Each doubling costs a bit of precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partners is not None and self.partners % 2:
            raise ValueError(f"partners must be an even number of at least 2, got {self.partners}")
