"""Average many clients' tensors key by key, streaming, bit-identically for any order.

Tensors of floating point are averaged in fixed point (see `fixed_point`). Tensors of integers - counters such as a batch norm's
``num_batches_tracked`` - have no mean: of values the largest is taken, of changes (before minus after) the smallest, both of
which mean the client that counted furthest. A key that only some contributors have is averaged over these. What a single
contributor gave comes out as it is, bit for bit.

A chunk of a key goes through all steps while it is in a core's cache: each contributor's part is read and added, the mean is taken,
compared with every part, and given away. If contributors are many, or must be decoded whole, they are processed one after the other, and
the key's sums are kept meanwhile.

`strategy_step` makes a `Fold` for each round, or what `server_run` puts in its place (``privacy``, `secure_sums`), and applies each mean.
Decoded or stored tensors come in, the mean goes out key by key. Tests compare its bits with those of earlier versions: a change of
dtype or rounding changes results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from arclight.federated.aggregation.chunks import (
    Array,
    ChunkedTensor,
    ChunkWorkers,
    Scratch,
    chunk_workers,
    product,
    squares,
    total,
)
from arclight.federated.aggregation.fixed_point import Contribution, Form, Scale, Terms, add, plan, sum_of
from arclight.federated.aggregation.statistics import Contributor, Statistics, StatisticsBuilder
from arclight.federated.errors import FederatedError

Tensors = Mapping[str, torch.Tensor]

Sink = Callable[[int, int, torch.Tensor, Scratch], None]
"""``take(start, stop, part, scratch)`` gets each part of a mean once, at most a chunk, from any thread and in any order. The part is
valid until it returns; of the scratch it may use ``raw``."""

SinkFactory = Callable[[torch.dtype, tuple[int, ...]], Sink]
"""Makes the function that takes a mean, once type and shape of the mean are known."""

_AT_ONCE = 16
"""Most contributors whose chunks are processed together: each thread keeps a chunk of terms and an open file for each."""

_HELD = 2
"""Most contributors that are processed together if one of their tensors is in memory as a whole."""


class WholeTensorSink:
    """A sink that collects a mean as one tensor."""

    def __call__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Sink:
        self.tensor = torch.empty(shape, dtype=dtype)
        flat = self.tensor.view(-1)

        def take(start: int, stop: int, part: torch.Tensor, scratch: Scratch) -> None:
            flat[start:stop] = part

        return take


@dataclass(frozen=True, kw_only=True)
class _KeyStatistics:
    """Scaled statistics of one key: squared norms of changes and mean, products with the mean."""

    sizes: Sequence[float]
    mean: float
    products: Sequence[float]


class Fold:
    """Average of contributions: an iterator over ``(key, mean)``.

    `statistics` are complete at its end.
    Means are float32, float64 for float64; integers keep their type. No more than one key's tensors are held.
    anchor: with ``form="weights"`` the weights before, by key, so that statistics are of changes.
    values: keys that hold values themselves although ``form`` is "delta" (moments that the server has not had yet).
    keys: which come, in this order; all by name by default. scales: as `plan` gave them, else they are found here.
    Clipped contributions are averaged clipped; their norms are reported unclipped.
    cosines: whether each contributor is compared with the mean.
    Raises FederatedError without contributions, RefusedError naming client and key if they cannot be aggregated.
    """

    def __init__(
        self,
        contributions: Iterable[Contribution],
        form: Form = "delta",
        *,
        anchor: Tensors | None = None,
        values: Iterable[str] = (),
        keys: Sequence[str] | None = None,
        scales: Mapping[str, Scale] | None = None,
        threads: int | None = None,
        cosines: bool = True,
    ) -> None:
        self._given = sorted(contributions, key=lambda given: given.client)
        if not self._given:
            raise FederatedError("there is nothing to fold: no contribution was given")
        values = set(values)
        self.scales = dict(scales) if scales is not None else plan(self._given, form, values=values, threads=threads)
        self._keys = list(keys) if keys is not None else sorted(self.scales)
        if unknown := [key for key in self._keys if key not in self.scales]:
            raise FederatedError(f"no contributor has {unknown[0]} ({len(unknown)} such keys)")
        self._anchor = {} if anchor is None else anchor
        self._of_values = set(self.scales) if form == "weights" else values
        self._threads, self._cosines = threads, cosines
        self._gathered = StatisticsBuilder(
            [Contributor(given.client, given.weight, given.samples) for given in self._given]
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with chunk_workers(self._threads) as workers:
            for key in self._keys:
                yield key, self.whole(key, workers)

    @property
    def statistics(self) -> Statistics:
        """Return statistics of the keys so far."""
        return self._gathered.statistics()

    def whole(self, key: str, workers: ChunkWorkers) -> torch.Tensor:
        """Return one key's mean."""
        mean = WholeTensorSink()
        self.each(key, workers, mean)
        return mean.tensor

    def each(self, key: str, workers: ChunkWorkers, into: SinkFactory) -> None:
        """Average one key; its mean is passed on part by part as it is made."""
        scale, holders = self.scales[key], self._holders(key)
        anchor = None
        if key in self._of_values and key in self._anchor and scale.rule in ("mean", "alone"):
            anchor = ChunkedTensor(self._anchor[key])
        terms = Terms(key, scale, anchor)
        if not terms.averaged:
            emit(_extreme(terms, holders), workers, into)
            return
        compared = self._cosines and self._gathered.counts(key)
        tensors: list[ChunkedTensor] = []
        most = _AT_ONCE  # fewer, once one of them is in memory
        while len(tensors) < len(holders) <= most:
            tensors.append(ChunkedTensor(holders[len(tensors)].tensors[key]))
            most = _HELD if tensors[-1].held else most
        fold = _fold_at_once if len(holders) <= most else _fold_in_turn
        self._record(terms, holders, fold(terms, holders, tensors, compared, workers, into))

    def _holders(self, key: str) -> list[Contribution]:
        return [given for given in self._given if key in given.keys]

    def _record(self, terms: Terms, holders: Sequence[Contribution], statistics: _KeyStatistics) -> None:
        key, of_mean = terms.key, _root(statistics.mean)
        self._gathered.mean(key, of_mean / terms.divisor)
        for given, size in zip(holders, statistics.sizes, strict=True):
            self._gathered.client(key, given.client, _root(size) / terms.factor(given))
        for given, size, crossed in zip(holders, statistics.sizes, statistics.products, strict=False):
            lengths = (_root(size) / terms.factor(given) * terms.factor(given), of_mean / terms.divisor * terms.divisor)
            self._gathered.product(key, given.client, crossed / lengths[0] / lengths[1] if all(lengths) else 0.0)


def _root(size: float) -> float:
    return float(np.sqrt(size))


def _fold_at_once(
    terms: Terms,
    holders: Sequence[Contribution],
    tensors: list[ChunkedTensor],
    compared: bool,
    workers: ChunkWorkers,
    into: SinkFactory,
) -> _KeyStatistics:
    """Average a key of few contributors: every chunk goes through all steps at once."""
    for given, tensor in zip(holders, tensors, strict=True):
        terms.admit(given, tensor)
    alone, factors = terms.scale.rule == "alone", [terms.factor(given) for given in holders]
    take = into(terms.mean_dtype, terms.shape)

    def work(start: int, stop: int, scratch: Scratch) -> list[float]:
        own = [
            tensor.wide(start, stop, scratch.float64_buffer(number), scratch) for number, tensor in enumerate(tensors)
        ]
        mean = terms.narrowed(own[0], scratch) if alone else None
        sizes = []
        for given, factor, one in zip(holders, factors, own, strict=True):
            one *= factor
            sizes.append(squares(one, scratch))
            terms.check(given, sizes[-1], one, scratch)
        if mean is None:
            summed = sum_of(own, scratch)
            mean = terms.mean(summed, scratch)
        else:
            summed = scratch.wide[: stop - start]
            np.copyto(summed, own[0])
        if terms.anchor is not None:
            for number, (factor, one) in enumerate(zip(factors, own, strict=True)):
                terms.to_change(one, factor, start, scratch)
                sizes[number] = squares(one, scratch)
            terms.to_change(summed, terms.divisor, start, scratch)
        of_mean = squares(summed, scratch)
        products: list[float] = []
        if compared:
            middle = terms.widened(mean, start, scratch)
            products = [product(one, middle, scratch) for one in own]
        take(start, stop, torch.from_numpy(mean), scratch)
        return [of_mean, *sizes, *products]

    columns = _columns(workers.map_chunks(terms.elements, work), 1 + len(holders) * (2 if compared else 1))
    return _KeyStatistics(mean=columns[0], sizes=columns[1 : 1 + len(holders)], products=columns[1 + len(holders) :])


def _fold_in_turn(
    terms: Terms,
    holders: Sequence[Contribution],
    tensors: list[ChunkedTensor],
    compared: bool,
    workers: ChunkWorkers,
    into: SinkFactory,
) -> _KeyStatistics:
    """Average a key one contributor at a time, in a second pass comparing each with the mean.

    tensors: those of the first contributors, if at hand; they are taken from the list.
    """
    summed = _KeySum(terms, workers)
    sizes = [
        summed.add(given, tensors.pop(0) if tensors else ChunkedTensor(given.tensors[terms.key])) for given in holders
    ]
    sums, take = summed.sums.numpy(), into(terms.mean_dtype, terms.shape)
    mean = torch.empty(terms.elements if compared else 0, dtype=terms.mean_dtype).numpy()

    def finish(start: int, stop: int, scratch: Scratch) -> float:
        wide = scratch.wide[: stop - start]
        np.copyto(wide, sums[start:stop], casting="same_kind")
        part = terms.mean(wide, scratch)
        if terms.anchor is not None:
            terms.to_change(wide, terms.divisor, start, scratch)
        size = squares(wide, scratch)
        if compared:
            mean[start:stop] = part
        take(start, stop, torch.from_numpy(part), scratch)
        return size

    of_mean = total(workers.map_chunks(terms.elements, finish))
    products = [
        _product(terms, terms.factor(given), ChunkedTensor(given.tensors[terms.key]), mean, workers)
        for given in (holders if compared else ())
    ]
    return _KeyStatistics(mean=of_mean, sizes=sizes, products=products)


def _product(terms: Terms, factor: float, tensor: ChunkedTensor, mean: Array, workers: ChunkWorkers) -> float:
    """Return the scaled inner product of a contributor's change and the mean's."""

    def work(start: int, stop: int, scratch: Scratch) -> float:
        one = tensor.wide(start, stop, scratch.float64_buffer(0), scratch)
        one *= factor
        if terms.anchor is not None:
            terms.to_change(one, factor, start, scratch)
        return product(one, terms.widened(mean[start:stop], start, scratch), scratch)

    return total(workers.map_chunks(terms.elements, work))


class _KeySum:
    """The int64 sums of one key, contributor by contributor."""

    def __init__(self, terms: Terms, workers: ChunkWorkers) -> None:
        self._terms, self._workers = terms, workers
        self.sums = torch.empty(0, dtype=torch.int64)
        self._begun = False

    def add(self, given: Contribution, tensor: ChunkedTensor) -> float:
        """Add a contributor; return the squared norm of its change, scaled.

        A single one's values are kept as they are.
        """
        terms, first = self._terms, not self._begun
        terms.admit(given, tensor)
        if first:
            self.sums, self._begun = torch.empty(terms.elements, dtype=torch.int64), True
        sums, factor = self.sums.numpy(), terms.factor(given)

        def work(start: int, stop: int, scratch: Scratch) -> float:
            one = tensor.wide(start, stop, scratch.wide, scratch)
            if terms.scale.rule == "alone":
                sums[start:stop] = one.view(np.int64)
            one *= factor
            size = squares(one, scratch)
            terms.check(given, size, one, scratch)
            if terms.scale.rule == "mean":
                add(one, sums[start:stop], scratch, first=first)
            if terms.anchor is not None:
                terms.to_change(one, factor, start, scratch)
                size = squares(one, scratch)
            return size

        return total(self._workers.map_chunks(tensor.elements, work))


def _extreme(terms: Terms, holders: Sequence[Contribution]) -> torch.Tensor:
    """Return the largest or smallest integer of each element, of the furthest counter."""
    found: torch.Tensor | None = None
    for given in holders:
        tensor = ChunkedTensor(given.tensors[terms.key])
        terms.admit(given, tensor)
        part = tensor.part(0, tensor.elements)
        if terms.scale.rule == "least" and part.dtype is torch.uint8:
            part = part.view(torch.int8)  # a change that counts up has wrapped around: 0 - 3 is 253
        whole = part.to(torch.int64)
        found = whole if found is None else _more_extreme(terms.scale, found, whole)
    assert found is not None
    return found.to(terms.dtype).view(terms.shape)


def _more_extreme(scale: Scale, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.maximum(one, other) if scale.rule == "most" else torch.minimum(one, other)


def emit(mean: torch.Tensor, workers: ChunkWorkers, into: SinkFactory) -> None:
    """Pass a whole mean to a sink, chunk by chunk."""
    take, flat = into(mean.dtype, tuple(mean.shape)), mean.reshape(-1)
    workers.map_chunks(flat.numel(), lambda start, stop, scratch: take(start, stop, flat[start:stop], scratch))


def _columns(rows: Sequence[Sequence[float]], count: int) -> list[float]:
    """Return the sum of each column, rounded once."""
    return [total(column) for column in zip(*rows, strict=True)] if rows else [0.0] * count


def mean_of(
    scale: Scale, sums: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], workers: ChunkWorkers | None = None
) -> torch.Tensor:
    """Return the mean of ``shape`` from the sums of all contributors.

    It is float64 for float64, else float32.
    """
    if workers is None:
        with chunk_workers(1) as one:
            return mean_of(scale, sums, dtype, shape, one)
    terms = Terms("", scale)
    terms.dtype = dtype
    if scale.rule != "mean":
        values = sums.view(torch.float64) if scale.rule == "alone" else sums
        return values.to(terms.mean_dtype, copy=True).reshape(tuple(shape))
    mean = torch.empty(sums.numel(), dtype=terms.mean_dtype)

    def work(start: int, stop: int, scratch: Scratch) -> None:
        wide = scratch.wide[: stop - start]
        np.copyto(wide, sums[start:stop].numpy(), casting="same_kind")
        mean[start:stop] = torch.from_numpy(terms.mean(wide, scratch))

    workers.map_chunks(sums.numel(), work)
    return mean.reshape(tuple(shape))
