"""One server step: spooled updates become the next round's checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arclight.checkpoint.tensorfile import DTYPES
from arclight.federated.aggregation.scale import Contribution, Form
from arclight.federated.aggregation.statistics import Statistics
from arclight.federated.aggregation.step import Step
from arclight.federated.blobs import BlobStore
from arclight.federated.protocol import Manifest
from arclight.federated.rounds.store import Rounds, layout_of
from arclight.federated.rounds.writing import Described, Written, in_order, weights_manifest
from arclight.federated.server.decoded import Decoded
from arclight.federated.strategies import Strategy

ENTRY = "model"
MODEL = f"{ENTRY}/"


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
    form: Form
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
        moments = anchor.moments_after(given)
        step = Step(
            self.strategy,
            anchor.by_key(),
            contributions,
            form=self.form,
            states=anchor.states(),
            counts=anchor.counts,
            order=[*(MODEL + name for name in anchor.layout[ENTRY]), *moments],
        )
        states = {
            f"{kind}/{key.removeprefix(MODEL)}": described
            for key, kinds in step.states_after().items()
            for kind, described in kinds.items()
        }
        layout = {ENTRY: anchor.layout[ENTRY], "moments": moments, "server": states}
        counts = dict(anchor.counts)
        with self.rounds.write(number, layout) as writer:
            for one in step:
                name = one.key.removeprefix(MODEL)
                if one.key.startswith(MODEL):
                    writer.add(ENTRY, name, one.value)
                    for kind, state in one.state.items():
                        writer.add("server", f"{kind}/{name}", state)
                else:
                    writer.add("moments", one.key, one.value.to(moments[one.key][0]))
                if one.count:
                    counts[one.key] = one.count
            statistics = step.statistics
            written = writer.publish(trees(statistics, counts))
        return Stepped(written=written, weights=weights_manifest(layout, written.files), statistics=statistics)


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

    def moments_after(self, given: Sequence[Given]) -> Described:
        """What the next round's file of moments holds: those there are, and those that clients send for the first time."""
        found = dict(self.layout.get("moments", {}))
        for one in given:
            for key, entry in one.manifest.tensors.items():
                if not key.startswith(MODEL):
                    found.setdefault(key, (DTYPES[entry.dtype], entry.shape))
        return dict(sorted(found.items()))

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The strategy's tensors by key, in the order in which they lie in their file."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for stored, tensor in self.server.items():
            kind, _, name = stored.partition("/")
            found.setdefault(MODEL + name, {})[kind] = tensor
        return found


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
