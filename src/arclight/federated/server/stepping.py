"""One server step: spooled updates become the next round's checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arclight.checkpoint.tensorfile import DTYPES
from arclight.checkpoint.tree import whole_of
from arclight.federated.aggregation.fold import Fold
from arclight.federated.aggregation.scale import Contribution
from arclight.federated.aggregation.statistics import Statistics
from arclight.federated.blobs import BlobStore
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Manifest
from arclight.federated.rounds.store import Rounds, layout_of
from arclight.federated.rounds.writing import Described, Written, in_order, weights_manifest
from arclight.federated.server.decoded import Decoded
from arclight.federated.strategies import FedAvg, Strategy

MODEL = "model/"


@dataclass(frozen=True, kw_only=True)
class Given:
    """One accepted update, as the fold takes it."""

    client: str
    manifest: Manifest
    weight: float
    samples: int
    largest: Mapping[str, float | None] | None = None
    """By key, as the check found it; None where this server has not seen the check itself."""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A round that is written."""

    written: Written
    weights: Manifest
    statistics: Statistics


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """Steps a run's weights with its strategy."""

    rounds: Rounds
    store: BlobStore
    strategy: Strategy
    form: str
    """What clients send: "delta" or "weights"."""

    def step(
        self,
        number: int,
        before: int,
        given: Sequence[Given],
        trees: Callable[[Statistics, dict[str, int]], dict[str, Any]],
    ) -> Stepped:
        """Fold the updates, move the weights of round ``before``, and write them as round ``number``.

        ``trees`` makes the other entries of the checkpoint from the fold's statistics and each tensor's count of steps.
        Raises FederatedError where updates cannot be folded, OSError where there is no room; nothing is left behind then.
        """
        contributions = [
            Contribution(
                client=one.client,
                weight=one.weight,
                tensors=Decoded(one.manifest, self.store),
                largest=one.largest,
                samples=one.samples,
            )
            for one in given
        ]
        anchor = _Anchor(self.rounds, before)
        has = {key for one in given for key in one.manifest.tensors}
        keys = anchor.in_file_order(has)
        new_moments = {key for key in has if not key.startswith(MODEL) and key not in anchor.moments}
        fold = Fold(contributions, self.form, anchor=anchor.by_key(), values=new_moments, keys=keys)  # type: ignore[arg-type]
        layout = anchor.layout_after(has, given, self.strategy.state_keys)
        counts = dict(anchor.counts)
        with self.rounds.write(number, layout) as writer:
            means = dict_of_next(fold)
            for name in layout["model"]:
                key, old = MODEL + name, whole_of(anchor.model[name])
                if key not in has:
                    writer.add("model", name, old)
                    self._keep_state(writer, layout, name, anchor)
                    continue
                new, state = self._moved(name, old, means(key), anchor.state_of(name, self.strategy.state_keys), counts)
                writer.add("model", name, new)
                for kind in self.strategy.state_keys if new.is_floating_point() else ():
                    writer.add("server", f"{kind}/{name}", state[kind])
            for name in layout.get("moments", {}):
                old_moment = whole_of(anchor.moments[name]) if name in anchor.moments else None
                if name not in has and old_moment is not None:
                    writer.add("moments", name, old_moment)
                else:
                    mean = means(name)
                    whole = self.form == "weights" or old_moment is None
                    value = mean if whole else old_moment.to(mean.dtype) - mean  # type: ignore[union-attr]
                    writer.add("moments", name, value.to(layout["moments"][name][0]))
            statistics = fold.statistics
            written = writer.publish(trees(statistics, counts))
        return Stepped(written=written, weights=weights_manifest(layout, written.files), statistics=statistics)

    def _moved(
        self, name: str, old: torch.Tensor, mean: torch.Tensor, state: dict[str, torch.Tensor], counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if not old.is_floating_point():  # counters: the client that counted furthest, see Fold
            return (mean if self.form == "weights" else old - mean).to(old.dtype), {}
        count = counts.get(name, 0)
        counts[name] = count + 1
        if self.form == "weights" and isinstance(self.strategy, FedAvg) and self.strategy.lr == 1:
            return mean.to(old.dtype), {}  # all of the way to the mean: a difference would round it
        gradient = old.to(torch.float64) - mean.to(torch.float64) if self.form == "weights" else mean
        if gradient.dtype == torch.float64 and old.dtype != torch.float64 and self.strategy.state_keys:
            gradient = gradient.to(torch.float32)  # states are float32
        new, after = self.strategy.step(old, gradient, state, count)
        if not bool(torch.isfinite(new).all()):
            raise FederatedError(
                f"the server's step would make {name} infinite or NaN (mean change of largest size {float(mean.abs().max()):.4g}): "
                "lower the strategy's lr, or bound updates with checks.norm_times"
            )
        return new, after

    def _keep_state(self, writer: Any, layout: Mapping[str, Described], name: str, anchor: _Anchor) -> None:
        for kind in self.strategy.state_keys:
            if f"{kind}/{name}" in layout["server"]:
                writer.add("server", f"{kind}/{name}", whole_of(anchor.server[f"{kind}/{name}"]))


class _Anchor:
    """A round's tensors, which stay in their files until they are used."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self.layout = layout_of(rounds.open(number))
        self.model, self.moments, self.server = (
            rounds.stored(number, entry) for entry in ("model", "moments", "server")
        )
        self.counts: dict[str, int] = rounds.trees(number)["round"].get("counts", {})

    def by_key(self) -> dict[str, torch.Tensor]:
        return {**{MODEL + name: tensor for name, tensor in self.model.items()}, **self.moments}

    def in_file_order(self, has: set[str]) -> list[str]:
        if strange := [key for key in has if key.startswith(MODEL) and key.removeprefix(MODEL) not in self.model]:
            raise FederatedError(f"an accepted update has {strange[0]}, which the weights do not have")
        model = [MODEL + name for name in self.layout["model"] if MODEL + name in has]
        return [*model, *sorted(key for key in has if not key.startswith(MODEL))]

    def layout_after(self, has: set[str], given: Sequence[Given], state_keys: Sequence[str]) -> dict[str, Described]:
        """What the next round's files hold."""
        model, server = self.layout["model"], dict[str, tuple[torch.dtype, tuple[int, ...]]]()
        for name, (dtype, shape) in model.items():
            for kind in state_keys if dtype.is_floating_point else ():
                stepped = MODEL + name in has or f"{kind}/{name}" in self.server
                if stepped:
                    server[f"{kind}/{name}"] = (torch.float64 if dtype == torch.float64 else torch.float32, shape)
        moments = dict(self.layout.get("moments", {}))
        for one in given:
            for key, entry in one.manifest.tensors.items():
                if not key.startswith(MODEL):
                    moments.setdefault(key, (DTYPES[entry.dtype], entry.shape))
        return {"model": model, "moments": dict(sorted(moments.items())), "server": server}

    def state_of(self, name: str, kinds: Sequence[str]) -> dict[str, torch.Tensor]:
        """The strategy's states of a weight; empty before its first step."""
        found = {kind: self.server[f"{kind}/{name}"] for kind in kinds if f"{kind}/{name}" in self.server}
        return {kind: whole_of(tensor) for kind, tensor in found.items()}


def dict_of_next(fold: Fold) -> Callable[[str], torch.Tensor]:
    """The fold's means, asked for by key in the order in which they come."""
    coming = iter(fold)

    def mean_of(key: str) -> torch.Tensor:
        found, mean = next(coming)
        if found != key:
            raise FederatedError(f"the fold gave {found} where {key} was due")
        return mean

    return mean_of


def begin(
    rounds: Rounds,
    number: int,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    trees: dict[str, Any],
) -> Stepped:
    """Write the weights that a run begins with as its first round."""
    layout = {"model": in_order(weights), "moments": dict(sorted(in_order(moments).items()))}
    with rounds.write(number, layout) as writer:
        for name in layout["model"]:
            writer.add("model", name, weights[name])
        for name in layout["moments"]:
            writer.add("moments", name, moments[name])
        written = writer.publish(trees)
    nothing = Statistics(norm=0.0, norms={}, cosines={}, norm_by_key={}, norms_by_key={}, noise_scale=None)
    return Stepped(written=written, weights=weights_manifest(layout, written.files), statistics=nothing)
