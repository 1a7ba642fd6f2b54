"""Step the server optimizer over all tensors, streaming: one tensor in memory at a time.

``server.server_step`` makes a `StrategyStep` for each round and writes what it yields; it takes the means from its own `Fold`. Strategies
(``federated.strategies``) are the update rules. Names of their states are in round checkpoints and stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from arclight.checkpoint.stored_tensor import StoredTensor
from arclight.federated.aggregation.chunks import ChunkedTensor, ChunkWorkers, Scratch, chunk_workers
from arclight.federated.aggregation.fixed_point import Contribution, Form, Scale
from arclight.federated.aggregation.fold import Fold, Sink, SinkFactory, Tensors
from arclight.federated.aggregation.statistics import PREFIX, Statistics
from arclight.federated.errors import FederatedError
from arclight.federated.strategies import Strategy

DtypeAndShape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SteppedTensor:
    """One key after the step."""

    key: str
    value: torch.Tensor
    """The new weight or moment, of its type before; the old one if no client sent this key."""
    state: dict[str, torch.Tensor]
    """The strategy's tensors; empty for moments, integers, and weights that have never been stepped."""
    count: int
    """Steps of this tensor so far."""


class StrategyStep:
    """Server step of ``strategy``: an iterator over `SteppedTensor`, one key at a time.

    It yields every key of ``order``; what no client sent stays as it is. Keys of ``model/`` are stepped by the strategy, but for integers and
    ``buffers``, which become the mean: no gradient moves them, and a step beyond the mean, or of a fixed size, could make a variance
    negative. All other keys are local moments: their mean replaces them. No more is held than the tensors of one key.

    anchor: the weights before, by key; tensors that lie in files (`StoredTensor`) are read when their turn comes. It may lack moments
    that the server has not had yet. Clients send moments as they are, whatever the form: a difference of two of different size would
    leave a small one with a wrong sign, and of exp_avg_sq a root is taken. states: by key what `SteppedTensor.state` was after the last
    step; counts: what `SteppedTensor.count` was. Both may lack keys. order: keys in the order in which they are to come; all, by name, by
    default. scales, threads, cosines: as for `Fold`. fold_maker: what makes the fold, with its arguments: `Fold` itself, or one of
    `privacy`. empty: allocates memory for new values and states, so that the caller can reuse it. Raises FederatedError for a key of a
    model that the anchor lacks and for a step to where floats end, and what `Fold` raises.
    """

    def __init__(
        self,
        strategy: Strategy,
        anchor: Tensors,
        contributions: Iterable[Contribution],
        *,
        form: Form = "delta",
        states: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        counts: Mapping[str, int] | None = None,
        order: Sequence[str] | None = None,
        buffers: Collection[str] = (),
        scales: Mapping[str, Scale] | None = None,
        threads: int | None = None,
        cosines: bool = True,
        fold_maker: Callable[..., Fold] = Fold,
        empty: Callable[[int, torch.dtype], torch.Tensor] = lambda elements, dtype: torch.empty(elements, dtype=dtype),
    ) -> None:
        given = list(contributions)
        sent = set().union(*(one.keys for one in given))
        new = sent - set(anchor)
        if strange := sorted(key for key in new if key.startswith(PREFIX)):
            raise FederatedError(f"{strange[0]} was sent and is not a weight of the model ({len(strange)} such keys)")
        self._strategy, self._anchor, self._form = strategy, anchor, form
        self._states, self._counts, self._buffers = states or {}, counts or {}, frozenset(buffers)
        self.order = sorted(set(anchor) | new) if order is None else list(order)
        if lost := sorted((set(anchor) | new) - set(self.order)):
            raise FederatedError(f"{lost[0]} has no place in the order ({len(lost)} such keys)")
        self._threads, self._empty = threads, empty
        self._fold = fold_maker(
            given,
            form,
            anchor=anchor if form == "weights" else None,
            values={key for key in sent if not key.startswith(PREFIX)},
            keys=[key for key in self.order if key in sent],
            scales=scales,
            threads=threads,
            cosines=cosines,
        )

    def states_after(self) -> dict[str, dict[str, DtypeAndShape]]:
        """Return types and shapes of every key's state after the step, in file order."""
        found: dict[str, dict[str, DtypeAndShape]] = {}
        for key in self.order:
            if key in self._fold.scales:
                if self._is_stepped(key):
                    weight = self._anchor[key]
                    described = (state_dtype(weight.dtype), tuple(weight.shape))
                    found[key] = dict.fromkeys(self._strategy.state_keys, described)
            elif key in self._states:
                found[key] = {name: (t.dtype, tuple(t.shape)) for name, t in self._states[key].items()}
        return {key: described for key, described in found.items() if described}

    def __iter__(self) -> Iterator[SteppedTensor]:
        with chunk_workers(self._threads) as workers:
            for key in self.order:
                count = self._counts.get(key, 0)
                if key in self._fold.scales:
                    stepped = self._one(key, count, workers)
                else:
                    state = {name: plain(tensor) for name, tensor in self._states.get(key, {}).items()}
                    stepped = SteppedTensor(key, plain(self._anchor[key]), state, count)
                yield stepped
                del stepped

    @property
    def statistics(self) -> Statistics:
        """Return statistics of the keys so far."""
        return self._fold.statistics

    def _is_stepped(self, key: str) -> bool:
        return key.startswith(PREFIX) and key not in self._buffers and self._anchor[key].is_floating_point()

    def _one(self, key: str, count: int, workers: ChunkWorkers) -> SteppedTensor:
        if key not in self._anchor:
            return SteppedTensor(key, self._fold.whole(key, workers), {}, count + 1)
        if self._is_stepped(key) and not (self._form == "weights" and self._strategy.goes_to_mean):
            return self._stepped(key, count, workers)
        anchor, is_mean = self._anchor[key], self._form == "weights" or not key.startswith(PREFIX)
        before, value = ChunkedTensor(anchor), self._empty(anchor.numel(), anchor.dtype)

        def take(start: int, stop: int, mean: torch.Tensor, scratch: Scratch) -> None:
            # a mean of narrower changes, as of a secure sum, must not round the weight
            wide = torch.float64 if anchor.dtype is torch.float64 else mean.dtype
            value[start:stop] = mean if is_mean else before.part(start, stop, scratch).to(wide) - mean

        self._fold.each(key, workers, self._fitting(key, take))
        return SteppedTensor(key, value.view(anchor.shape), {}, count + 1)

    def _fitting(self, key: str, take: Sink) -> SinkFactory:
        def into(dtype: torch.dtype, shape: tuple[int, ...]) -> Sink:
            if shape != (expected := tuple(self._anchor[key].shape)):
                raise FederatedError(f"{key} was sent as a tensor of {shape}, here it is of {expected}")
            return take

        return into

    def _stepped(self, key: str, count: int, workers: ChunkWorkers) -> SteppedTensor:
        """Step a tensor by the strategy, chunk by chunk unless it needs whole tensors."""
        anchor, strategy = ChunkedTensor(self._anchor[key]), self._strategy
        before = {name: ChunkedTensor(tensor) for name, tensor in self._states.get(key, {}).items()}
        value = self._empty(anchor.elements, anchor.dtype)
        state = {name: self._empty(anchor.elements, state_dtype(anchor.dtype)) for name in strategy.state_keys}

        def step(start: int, stop: int, change: torch.Tensor, scratch: Scratch | None = None) -> None:
            cut = anchor.shape if scratch is None else (stop - start,)
            weight, gradient = anchor.part(start, stop, scratch).view(cut), change.view(cut)
            if self._form == "weights":
                gradient = weight.to(torch.float64) - gradient.to(torch.float64)
            elif weight.dtype is torch.float64:
                gradient = gradient.to(torch.float64)  # the step is taken in its type
            given = {name: tensor.part(start, stop).view(cut) for name, tensor in before.items()}
            weight, made = strategy.step(weight, gradient, given, count)
            if set(made) != set(state):
                difference = f"{sorted(made)}, its state_keys are {sorted(state)}"
                raise FederatedError(f"{type(strategy).__name__} gave the state {difference}")
            for what, tensor in (("", weight), *((f"{name} of ", tensor) for name, tensor in made.items())):
                if not (math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())):
                    raise FederatedError(
                        f"the server's step would make {what}{key} infinite or NaN (its mean change is at most "
                        f"{float(gradient.abs().max()):.4g}): lower the lr of {strategy}, or refuse updates of large norm"
                    )
            value[start:stop] = weight.reshape(-1)
            for name, tensor in made.items():
                state[name][start:stop] = tensor.reshape(-1)

        if strategy.elementwise:
            self._fold.each(key, workers, self._fitting(key, step))
        else:
            step(0, anchor.elements, self._fold.whole(key, workers))
        shaped = {name: tensor.view(anchor.shape) for name, tensor in state.items()}
        return SteppedTensor(key, value.view(anchor.shape), shaped, count + 1)


def state_dtype(weight: torch.dtype) -> torch.dtype:
    """Return the type of a strategy's state tensors for a weight of this type."""
    return torch.float64 if weight == torch.float64 else torch.float32


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in memory."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor.detach()
