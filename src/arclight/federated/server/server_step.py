"""Turn accepted updates into the next round's checkpoint, tensor by tensor.

`server_run` calls it when the coordinator commands `Aggregate`, one round at a time; it feeds `StrategyStep` and `RoundWriter`. The checkpoint
is written before the journal commits the round, so a step that is repeated after a crash must give the same tensors, bit for bit (unless the
server adds noise). Entries ``model``, ``moments`` and ``server`` and keys ``<kind>/<name>`` of the last two are in run folders and stay; so must the
order, in which weights are stepped as in the layout of the previous round, then moments by key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arclight.checkpoint.stored_tensor import StoredTensor
from arclight.checkpoint.tensorfile import DTYPES
from arclight.federated.aggregation import strategy_step as aggregation
from arclight.federated.aggregation.fixed_point import Contribution, Form
from arclight.federated.aggregation.fold import Fold
from arclight.federated.aggregation.statistics import Statistics
from arclight.federated.aggregation.strategy_step import DtypeAndShape, SteppedTensor, StrategyStep, plain
from arclight.federated.blobs import BlobStore
from arclight.federated.codecs.encoding import LazyTensors
from arclight.federated.errors import FederatedError
from arclight.federated.masks.experts import expert_key, expert_of
from arclight.federated.protocol import Manifest
from arclight.federated.rounds.store import Rounds, layout_of
from arclight.federated.rounds.writer import BufferPool, TensorLayout, WrittenCheckpoint, in_order, weights_manifest
from arclight.federated.strategies import Strategy

ENTRY = "model"
MODEL = f"{ENTRY}/"


@dataclass(frozen=True, kw_only=True)
class AcceptedUpdate:
    """An accepted update, as it is aggregated."""

    client: str
    manifest: Manifest
    weight: float
    staleness_discount: float = 1.0
    """Factor of its change: 1 / sqrt(1 + staleness in rounds) for a stale one (FedBuff, Nguyen et al. 2022). Its weight in the divisor of the
    mean stays, so that a buffer of stale updates makes a smaller step."""
    samples: int
    largest: Mapping[str, float | None] | None = None
    """Largest magnitude by key, from validation; None if another process has validated it."""
    norm: float | None = None
    """L2 norm of its change."""

    def contribution(self, store: BlobStore) -> Contribution:
        return Contribution(
            client=self.client,
            weight=self.weight,
            scale=self.staleness_discount,
            tensors=LazyTensors(self.manifest, store),
            largest=self.largest,
            samples=self.samples,
            norm=self.norm,
        )


@dataclass(frozen=True, kw_only=True)
class WrittenRound:
    """A round that is written."""

    written: WrittenCheckpoint
    weights: Manifest
    statistics: Statistics
    all_changed: bool = False
    """Whether every tensor of the weights was sent by some client."""


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """Step a run's weights with its strategy."""

    rounds: Rounds
    store: BlobStore
    strategy: Strategy
    form: Form
    """What clients send: "delta" or "weights"."""
    fold_maker: Callable[..., Fold] = Fold
    """What makes the mean of a round's updates; see `StrategyStep`."""
    is_stack: Callable[[str], bool] = lambda key: False
    """Whether a tensor holds experts, which are folded one by one."""

    def step(
        self,
        number: int,
        before: int,
        given: Sequence[AcceptedUpdate],
        trees: Callable[[Statistics, dict[str, int]], dict[str, Any]],
    ) -> WrittenRound:
        """Aggregate the updates, step the weights of round ``before``, and write round ``number``.

        ``trees`` makes the other entries of the checkpoint from the fold's statistics and each tensor's count of steps.
        Raises FederatedError if updates cannot be folded, OSError if there is no room; nothing is left behind then.
        """
        contributions = [one.contribution(self.store) for one in given]
        anchor = _PreviousRound(self.rounds, before)
        anchor.keep_states_of(self.strategy)
        stacks = ExpertStacks.find(anchor.described(self._states_sent(given)), self.is_stack)
        moments = anchor.moments_after(given, stacks)
        parts, sent = stacks.split(anchor.by_key()), {key for one in given for key in one.manifest.tensors}
        order = (part for key in [*anchor.keys(), *moments] for part in stacks.parts(key))
        memory = BufferPool()
        step = StrategyStep(
            self.strategy,
            parts,
            contributions,
            form=self.form,
            states=stacks.split_states(anchor.states(), anchor.counts),
            counts=anchor.counts,
            order=[part for part in order if part in parts or part in sent],
            buffers=[part for name in anchor.buffers for part in stacks.parts(MODEL + name)],
            fold_maker=self.fold_maker,
            empty=memory.empty,
        )
        states = {
            f"{kind}/{key.removeprefix(MODEL)}": described
            for key, kinds in stacks.described(step.states_after()).items()
            for kind, described in kinds.items()
        }
        layout = {ENTRY: anchor.layout[ENTRY], "moments": moments, "server": states}
        counts = dict(anchor.counts)
        with self.rounds.write(number, layout) as writer:
            for key, value, state in stacks.stack(_counted(step, counts)):
                name = key.removeprefix(MODEL)
                if key.startswith(MODEL):
                    writer.add(ENTRY, name, value, memory.release)
                    for kind, tensor in state.items():
                        writer.add("server", f"{kind}/{name}", tensor, memory.release)
                else:
                    writer.add("moments", key, value.to(moments[key][0]), memory.release)
            statistics = step.statistics
            written = writer.publish(trees(statistics, counts))
        return WrittenRound(
            written=written,
            weights=weights_manifest(layout, written.files),
            statistics=statistics,
            all_changed=sent >= {part for key in anchor.keys() for part in stacks.parts(key)},  # noqa: SIM118 (not a dict)
        )

    def _states_sent(self, given: Sequence[AcceptedUpdate]) -> set[str]:
        """Return the kinds of local states that clients have sent."""
        return {key.partition("/")[0] for one in given for key in one.manifest.tensors if not key.startswith(MODEL)}


def _counted(step: StrategyStep, counts: dict[str, int]) -> Iterator[aggregation.SteppedTensor]:
    """Iterate over a step, and update ``counts``."""
    for one in step:
        if one.count:
            counts[one.key] = one.count
        yield one


_NOTHING = Statistics(norm=0.0, norms={}, cosines={}, norm_by_key={}, norms_by_key={}, noise_scale=None)


class _PreviousRound:
    """The tensors of the round before, which stay in their files until they are used."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self.layout = layout_of(rounds.open(number))
        self.model, self.moments, self.server = (
            rounds.stored(number, entry) for entry in ("model", "moments", "server")
        )
        trees = rounds.trees(number, "round", "buffers")
        self.counts: dict[str, int] = trees["round"].get("counts", {})
        self.buffers: list[str] = trees.get("buffers", [])

    def keep_states_of(self, strategy: Strategy) -> None:
        """Drop states and counts that are of other kinds than those of ``strategy``.

        A fork may have another strategy than the run that it is from.
        """
        kinds = {stored.partition("/")[0] for stored in self.server}
        if kinds != set(strategy.state_keys):
            self.server, self.counts = {}, {}

    def by_key(self) -> dict[str, torch.Tensor]:
        return {**{MODEL + name: tensor for name, tensor in self.model.items()}, **self.moments}

    def keys(self) -> list[str]:
        return [MODEL + name for name in self.layout[ENTRY]]

    def described(self, states: Collection[str]) -> TensorLayout:
        """Return types and shapes of weights and their moments, by key."""
        model = self.layout[ENTRY]
        kinds = {key.partition("/")[0] for key in self.layout.get("moments", {})} | set(states)
        return {f"{kind}/{name}": model[name] for kind in ("model", *sorted(kinds)) for name in model}

    def moments_after(self, given: Sequence[AcceptedUpdate], stacks: ExpertStacks) -> TensorLayout:
        """Return the layout of the next round's moments: present ones, and new ones of clients."""
        found = dict(self.layout.get("moments", {}))
        for one in given:
            for part, entry in one.manifest.tensors.items():
                key = stacks.whole(part)
                count = (stacks.counts[key],) if key != part else ()
                if not key.startswith(MODEL):
                    found.setdefault(key, (DTYPES[entry.dtype], (*count, *entry.shape)))
        return dict(sorted(found.items()))

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the strategy's tensors by key, in the order of their file."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for stored, tensor in self.server.items():
            kind, _, name = stored.partition("/")
            found.setdefault(MODEL + name, {})[kind] = tensor
        return found


def write_first_round(
    rounds: Rounds,
    number: int,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
    trees: dict[str, Any],
) -> WrittenRound:
    """Write the initial weights as a run's first round."""
    layout = {"model": in_order(weights), "moments": dict(sorted(in_order(moments).items()))}
    with rounds.write(number, layout) as writer:
        for name in layout["model"]:
            writer.add("model", name, weights[name])
        for name in layout["moments"]:
            writer.add("moments", name, moments[name])
        written = writer.publish(trees)
    return WrittenRound(written=written, weights=weights_manifest(layout, written.files), statistics=_NOTHING)


def repeat_round(
    rounds: Rounds, number: int, before: int, trees: Callable[[Statistics, dict[str, int]], dict[str, Any]]
) -> WrittenRound:
    """Write the weights, moments and states of round ``before`` again, as round ``number``."""
    anchor = _PreviousRound(rounds, before)
    layout: dict[str, TensorLayout] = {entry: anchor.layout.get(entry, {}) for entry in (ENTRY, "moments", "server")}
    with rounds.write(number, layout) as writer:
        for entry, tensors in layout.items():
            kept = rounds.stored(before, entry)
            for name in tensors:
                writer.add(entry, name, plain(kept[name]))
        written = writer.publish(trees(_NOTHING, dict(anchor.counts)))
    return WrittenRound(written=written, weights=weights_manifest(layout, written.files), statistics=_NOTHING)


@dataclass(frozen=True)
class ExpertStacks:
    """Tensors that stack experts: split, and stacked again.

    counts: experts of each such tensor, by whole key.
    """

    counts: Mapping[str, int]

    @classmethod
    def find(cls, described: Mapping[str, DtypeAndShape], is_stack: Callable[[str], bool]) -> ExpertStacks:
        return cls({key: shape[0] for key, (_, shape) in described.items() if shape and is_stack(key)})

    def whole(self, key: str) -> str:
        """Return the key of the whole tensor that ``key`` is or is a part of."""
        found = expert_of(key)
        return found[0] if found is not None and found[0] in self.counts else key

    def parts(self, key: str) -> list[str]:
        """Return the keys that a whole tensor is averaged under."""
        return [expert_key(key, number) for number in range(self.counts[key])] if key in self.counts else [key]

    def split(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Split tensors by the keys that they are averaged under.

        Stored ones stay in their files until used.
        """
        found: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            if key not in self.counts:
                found[key] = tensor
            else:
                for number in range(self.counts[key]):
                    found[expert_key(key, number)] = (
                        tensor.row(number) if isinstance(tensor, StoredTensor) else tensor[number]
                    )
        return found

    def split_states(
        self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, int]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Split the strategy's tensors; an expert that was never stepped has none."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, kinds in states.items():
            for kind, tensor in kinds.items():
                for part, value in self.split({key: tensor}).items():
                    if key == part or counts.get(part):
                        found.setdefault(part, {})[kind] = value
        return found

    def described(self, parts: Mapping[str, Mapping[str, DtypeAndShape]]) -> dict[str, dict[str, DtypeAndShape]]:
        """Join types and shapes of parts to those of whole keys."""
        found: dict[str, dict[str, DtypeAndShape]] = {}
        for part, kinds in parts.items():
            key = self.whole(part)
            count = (self.counts[key],) if key != part else ()
            found.setdefault(key, {}).update(
                {kind: (dtype, (*count, *shape)) for kind, (dtype, shape) in kinds.items()}
            )
        return found

    def stack(self, stepped: Iterable[SteppedTensor]) -> Iterator[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]:
        """Stack the experts of each tensor: iterate over whole key, value and state.

        Moments and states of experts that nobody has trained yet are zero. Raises FederatedError for weights that lack an expert.
        """
        held: list[SteppedTensor] = []
        for one in stepped:
            if held and self.whole(one.key) != self.whole(held[0].key):
                yield self._stacked(held)
                held = []
            if one.key in self.counts or self.whole(one.key) == one.key:
                yield one.key, one.value, one.state
            else:
                held.append(one)
            del one
        if held:
            yield self._stacked(held)

    def _stacked(self, experts: list[SteppedTensor]) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
        key = self.whole(experts[0].key)

        def stack(values: Mapping[int, torch.Tensor]) -> torch.Tensor:
            first = next(iter(values.values()))
            out = torch.zeros((self.counts[key], *first.shape), dtype=first.dtype)
            for number, value in values.items():
                out[number] = value
            return out

        numbered = {found[1]: one for one in experts if (found := expert_of(one.key)) is not None}
        missing = [str(number) for number in range(self.counts[key]) if number not in numbered]
        if missing and key.startswith(MODEL):
            raise FederatedError(
                f"{key} lacks {len(missing)} of {self.counts[key]} experts: {', '.join(missing)}; a round is written with all of them"
            )
        kinds = dict.fromkeys(kind for one in experts for kind in one.state)
        state = {
            kind: stack({n: one.state[kind] for n, one in numbered.items() if kind in one.state}) for kind in kinds
        }
        return key, stack({n: one.value for n, one in numbered.items()}), state
