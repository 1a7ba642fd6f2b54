"""Define the settings of a federation, without importing torch.

`Server` and `simulate` take a `Federation`; a recipe's table ``[federation]`` is one. Field names are recipe keys. A resumed run must have
the settings it was begun with, but for those in ``coordinator._FREE``: the journal keeps `coordinator.settings_digest`, which leaves out
fields at their default. A new field, here or in a nested setting, needs a default that changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from arclight._intervals import Checked, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, former_names
from arclight.federated.codecs.settings import Codec, Raw
from arclight.federated.coordination.settings import Buffered, Sampling, Streaming, Waiting
from arclight.federated.masks.settings import Masks
from arclight.federated.privacy.settings import Krum, Noise, NormBound, Robust, SecureSum
from arclight.federated.strategies import FedAvg, Strategies


@dataclass(frozen=True, kw_only=True)
class Checks(Checked):
    """Limits beyond which well-formed updates are refused as implausible.

    The round's history names the client and the reason.
    """

    norm_times: NonNegativeFloat = 100.0
    """Refuse updates whose norm is so many times the median of those accepted before; before any was, so many times that of
    the weights. 0 accepts any."""
    weight_times: NonNegativeFloat = 1000.0
    """Refuse updates that claim so many times the samples (or tokens) per step of the median accepted before. 0 accepts any."""
    bytes_times: PositiveFloat = 2.0
    """Refuse updates larger in bytes than this share of the weights that they change, beside 1 MB for names."""


@former_names(journal_every="checkpoint_every_steps")
@dataclass(frozen=True, kw_only=True)
class Federation(Checked):
    """Settings of a federation: rounds of local training, and the server's aggregation."""

    clients: PositiveInt = 4
    """Number of clients, each with data of its own."""
    rounds: NonNegativeInt = 10
    """Number of rounds."""
    local_steps: PositiveInt = 50
    """Optimizer steps of each client between two exchanges."""
    strategy: Strategies = field(default_factory=FedAvg)
    """Server optimizer."""
    send: Literal["delta", "weights"] = "delta"
    """Payload of clients: the delta, or the weights, with which one client equals centralised training bit for bit."""
    weigh_by: Literal["samples", "tokens", "equal"] = "samples"
    """Weight of a client in the mean."""
    robust: Robust | None = None
    """Robust aggregation against a few broken or hostile clients; none for the weighted mean."""
    noise: Noise | None = None
    """Differential privacy of clients: clip updates and add noise to the sum."""
    secure: SecureSum | None = None
    """Secure aggregation: the server learns only the sum of the updates."""
    moments: tuple[str, ...] = ()
    """Local optimizer states that are averaged too, as exp_avg."""
    masks: Masks = field(default_factory=Masks)
    """Selection of the tensors that are sent, and in which rounds."""
    up: Codec = field(default_factory=Raw)
    """Codec of updates to the server."""
    down: Codec = field(default_factory=Raw)
    """Codec of weights to the clients."""
    down_changes: NonNegativeInt = 8
    """Deltas kept for nodes that missed rounds; a node that is further behind fetches full weights. 0: all do (then ``down`` must be raw)."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the clients of a round."""
    waiting: Waiting = field(default_factory=Waiting)
    """Quorum and timeouts of a round."""
    buffered: Buffered | None = None
    """Asynchronous aggregation (FedBuff)."""
    streaming: Streaming | None = None
    """Exchange in fragments, overlapped with training."""
    checkpoint_every_steps: PositiveInt = 50
    """Steps between two saves of a client's progress: a killed client repeats at most this many."""
    evaluate_every: NonNegativeInt = 1
    """Rounds between evaluations; 0 never evaluates."""
    evaluate_on: Literal["clients", "server"] = "server"
    """Evaluate on the server's validation data, or on every client's, weighted by samples."""
    blobs_at: str | None = None
    """Address of an object store (``s3://bucket/folder``) for tensors; none: through the server."""
    keep_rounds: NonNegativeInt = 3
    """Newest rounds whose checkpoints are kept; 0 keeps all."""
    checks: Checks = field(default_factory=Checks)
    """Plausibility limits of updates."""
    reset_optimizer: bool = False
    """Reset clients' optimizer states between rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.robust, NormBound) and self.send != "delta":
            raise ValueError('norm bounds are for changes: set send = "delta"')
        if self.noise is not None:
            self._check_noise(self.noise)
        if self.secure is not None:
            self._check_secure(self.secure)
        if self.down_changes == 0 and not isinstance(self.down, Raw):
            raise ValueError(
                f"down = {self.down} sends changes: down_changes must be at least 1, got {self.down_changes}"
            )
        if self.sampling.per_round is not None and self.sampling.per_round > self.clients:
            raise ValueError(f"a round cannot draw {self.sampling.per_round} of {self.clients} clients")
        if self.buffered is not None and self.streaming is not None:
            raise ValueError("rounds are either buffered or streamed in fragments: give one of both")
        if self.buffered is not None and self.send != "delta":
            raise ValueError('updates of buffered rounds begin from different weights: set send = "delta"')
        if self.buffered is not None and self.buffered.size > (self.sampling.per_round or self.clients):
            raise ValueError(
                f"a buffer of {self.buffered.size} updates is never full with {self.sampling.per_round or self.clients} clients at work"
            )
        if self.masks.personal_from == "client" and self.evaluate_on == "server":
            raise ValueError(
                'masks.personal_from = "client": the server\'s own values of these tensors are trained by nobody, so that it has no whole model '
                'to evaluate; set evaluate_on = "clients", each with its own'
            )
        self._check_robust()
        if self.streaming is not None and self.local_steps % self.streaming.fragments:
            raise ValueError(
                f"{self.local_steps} local steps cannot be divided into {self.streaming.fragments} fragments' rounds of equal length"
            )

    @property
    def least_folded(self) -> int:
        """Return the updates below which a round cannot be aggregated, whatever its quorum."""
        krum = self.robust if isinstance(self.robust, Krum) else None
        return 1 if krum is None else max(2 * krum.byzantine + 3, krum.keep + krum.byzantine)

    @property
    def overlap(self) -> int:
        """Rounds of a client whose updates may be in flight while its next one is trained."""
        return self.streaming.overlap if self.streaming is not None else 0

    def residual_slot(self, round: int) -> int:
        """Return the residual slot of a round; rounds in flight together have different slots."""
        return round % max(self.streaming.fragments, self.overlap + 1) if self.streaming is not None else 0

    def _check_robust(self) -> None:
        """Check that every round that may close can be aggregated."""
        if isinstance(self.robust, Krum) and self.masks.splits_experts:
            raise ValueError(
                "krum compares whole updates, and clients with masks.experts or masks.head_experts send their own experts: use another "
                "robust mean, or leave these masks out"
            )
        if isinstance(self.robust, Krum) and self.buffered is not None and self._has_periods_of_weights():
            raise ValueError(
                "krum compares whole updates, and a buffer has updates of several rounds, which send different weights by masks.periods: "
                "use another robust mean, or leave buffered out, or masks.periods of weights"
            )
        wanted = self.buffered.size if self.buffered is not None else self.sampling.per_round or self.clients
        if (closes := self.waiting.need(wanted)) < self.least_folded:
            raise ValueError(
                f"rounds may close with {closes} of {wanted} updates (waiting.quorum = {self.waiting.quorum:g}), {self.robust} needs "
                f"{self.least_folded}: raise waiting.quorum{'' if wanted >= self.least_folded else ' and the clients of a round'}, or lower "
                "robust.byzantine and robust.keep"
            )

    def _has_periods_of_weights(self) -> bool:
        patterns = (pattern for pattern, every in self.masks.periods.items() if every > 1)
        return any(pattern.partition("/")[0] not in self.moments for pattern in patterns)

    def _check_noise(self, noise: Noise) -> None:
        """Check that settings allow to account noise: each client moves the sum by at most the clip."""
        if self.send != "delta" or self.weigh_by != "equal" or self.moments:
            raise ValueError('with noise set send = "delta" and weigh_by = "equal", and leave moments empty')
        if self.robust is not None or self.buffered is not None or self.streaming is not None:
            raise ValueError("noise goes with whole rounds of plain means: leave robust, buffered and streaming out")
        if noise.by == "clients" and self.masks.splits_experts:
            raise ValueError(
                "noise by clients is divided among all of a round's, and a tensor of experts has only some of them: it would get "
                'less than promised; set noise.by = "server", or leave masks.experts and masks.head_experts out'
            )
        if noise.by == "clients" and not isinstance(self.up, Raw):
            raise ValueError('noise by clients needs up = "raw": what a codec leaves for later was not clipped')

    def _check_secure(self, secure: SecureSum) -> None:
        """Check that sums can be secure: whole rounds of the same tensors of all clients."""
        if self.send != "delta" or not isinstance(self.up, Raw) or self.moments or self.masks != Masks():
            raise ValueError(
                'secure sums are of changes as they are: set send = "delta" and up = "raw", leave moments and masks'
            )
        if self.robust is not None or self.buffered is not None or self.streaming is not None:
            raise ValueError(
                "secure sums go with whole rounds of plain means: leave robust, buffered and streaming out"
            )
        if self.waiting.quorum < secure.threshold:
            raise ValueError(
                f"rounds may close with {self.waiting.quorum:g} of their clients (waiting.quorum), a secure sum needs "
                f"{secure.threshold:g} (secure.threshold): raise the one or lower the other"
            )
        if self.noise is not None and self.noise.by != "clients":
            raise ValueError('in a secure sum the server cannot clip: set noise.by = "clients"')
