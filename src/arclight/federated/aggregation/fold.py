"""Many clients' tensors become one: key by key, streaming, with the same bits for any order, thread count or split.

Tensors of floating point are averaged in fixed point (see `scale`). Tensors of integers - counters such as a batch norm's
``num_batches_tracked`` - have no mean: of values the largest is taken, of changes (before minus after) the smallest, both of
which mean the client that counted furthest. A key that only some contributors have is averaged over these. What a single
contributor gave comes out as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from arclight.federated.aggregation.chunks import Array, Chunked, Lanes, Scratch, lanes, product, squares, total
from arclight.federated.aggregation.scale import LARGEST, Contribution, Form, Scale, is_mean, not_finite, plan
from arclight.federated.aggregation.statistics import Gathered, Statistics, Told
from arclight.federated.errors import FederatedError, RefusedError

Tensors = Mapping[str, torch.Tensor]


class Fold:
    """The mean of several contributions, an iterator over ``(key, mean)``; `statistics` once it is through.

    Means are float32, float64 for float64; integers keep their type. No more than one key's tensors are held.
    anchor: with ``form="weights"`` the weights before, by key, so that statistics are of changes.
    values: keys that hold values themselves although ``form`` is "delta" (moments that the server has not had yet).
    keys: which come, in this order; all by name by default. scales: as `plan` gave them, else they are found here.
    Contributors that are shrunk are averaged shrunk; their norms are told as they were.
    cosines: whether each contributor is compared with the mean, which reads its tensors once more.
    Raises FederatedError without contributions, RefusedError naming client and key where they cannot be folded.
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
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._gathered = Gathered([Told(given.client, given.weight, given.samples) for given in self._given])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with lanes(self._threads) as among:
            for key in self._keys:
                yield key, self._one(key, among)

    @property
    def statistics(self) -> Statistics:
        """Of the keys that have come so far."""
        return self._gathered.statistics()

    def _one(self, key: str, among: Lanes) -> torch.Tensor:
        scale = self.scales[key]
        holders = [given for given in self._given if key in given.keys]
        anchor = None
        if key in self._of_values and key in self._anchor and scale.rule in ("mean", "alone"):
            anchor = Chunked(self._anchor[key])
        sums, norms = _Sums(key, scale, among, self._buffer), dict[str, float]()
        for given in holders:
            norm = sums.add(given, anchor)
            if norm is not None:
                norms[given.client] = norm
                self._gathered.client(key, given.client, norm)
        self._buffer = sums.buffer
        mean, norm_of_mean = _mean(scale, sums.total, sums.dtype, sums.shape, anchor, among)
        if sums.dtype.is_floating_point:
            self._gathered.mean(key, norm_of_mean)
            if self._cosines and self._gathered.counts(key):
                whole = Chunked(mean)
                for given in holders:
                    own = scale.factor_for(given, key)
                    lengths = (norms[given.client] * own, norm_of_mean * scale.factor(scale.total))
                    cosine = _cosine(scale, own, Chunked(given.tensors[key]), whole, anchor, lengths, among)
                    self._gathered.product(key, given.client, cosine)
        return mean


class _Sums:
    """One key's terms as they are added up."""

    def __init__(self, key: str, scale: Scale, among: Lanes, buffer: torch.Tensor | None = None) -> None:
        self.key, self.scale, self._among = key, scale, among
        self.buffer = torch.empty(0, dtype=torch.int64) if buffer is None else buffer
        self.dtype, self.shape = torch.float32, tuple[int, ...]()
        self._first = ""

    def add(self, given: Contribution, anchor: Chunked | None = None) -> float | None:
        """Take a contributor in; returns the L2 norm of its change, in units of its own factor; None for integers."""
        tensor = Chunked(given.tensors[self.key])
        averaged = is_mean(given.client, self.key, tensor.dtype)
        if averaged != (self.scale.rule in ("mean", "alone")):
            raise RefusedError(
                "wrong_shape", f"{given.client} sent {self.key} as {tensor.dtype}, others differ in kind"
            )
        if not self._first:
            self._first, self.shape, self.dtype = given.client, tensor.shape, tensor.dtype
            if tensor.elements > self.buffer.numel():
                self.buffer = torch.empty(tensor.elements, dtype=torch.int64)
            self.total = self.buffer[: tensor.elements]
            first = True
        else:
            first = False
            if self.scale.rule == "alone":
                raise FederatedError(f"{self.key}: {given.client} is one more contributor than was planned for")
        for what, other in ((given.client, tensor), ("the server", anchor)):
            if other is not None and other.shape != self.shape:
                raise RefusedError(
                    "wrong_shape", f"{what} has {self.key} of {other.shape}, {self._first} of {self.shape}"
                )
        if tensor.dtype is torch.float64:
            self.dtype = torch.float64
        if averaged:
            return self._add_terms(given, tensor, anchor, first)
        self._take_furthest(tensor, first)
        return None

    def _add_terms(self, given: Contribution, tensor: Chunked, anchor: Chunked | None, first: bool) -> float:
        sums, factor = self.total.numpy(), self.scale.factor_for(given, self.key)
        alone = self.scale.rule == "alone"

        def work(start: int, stop: int, scratch: Scratch) -> float:
            terms = tensor.wide(start, stop, scratch.wide, scratch)
            if alone:
                sums[start:stop] = terms.view(np.int64)
            terms *= factor
            size = squares(terms, scratch)
            self._check(given.client, size, terms, scratch)
            if anchor is not None:
                size = squares(_change(anchor, factor, terms, start, stop, scratch), scratch)
            if alone:
                return size
            whole = sums[start:stop] if first else scratch.whole[: stop - start]
            np.copyto(whole, np.rint(terms, out=terms), casting="unsafe")
            if not first:
                sums[start:stop] += whole
            return size

        return float(np.sqrt(total(self._among.over(tensor.elements, work)))) / factor

    def _check(self, client: str, size: float, terms: Array, scratch: Scratch) -> None:
        """No term may be larger than planned for; the sum of squares tells at once that most are not."""
        if size <= LARGEST**2:
            return
        peak = float(np.abs(terms, out=scratch.spare[: len(terms)]).max())
        if not np.isfinite(peak):
            raise not_finite(client, self.key)
        if peak > LARGEST:
            raise FederatedError(f"{client} has larger values in {self.key} than were measured: measure it again")

    def _take_furthest(self, tensor: Chunked, first: bool) -> None:
        sums = self.total.numpy()
        furthest = np.maximum if self.scale.rule == "most" else np.minimum

        def work(start: int, stop: int, scratch: Scratch) -> None:
            whole = tensor.part(start, stop, scratch).to(torch.int64).numpy()
            sums[start:stop] = whole if first else furthest(sums[start:stop], whole)

        self._among.over(tensor.elements, work)


def partial(
    contributions: Iterable[Contribution],
    scales: Mapping[str, Scale],
    keys: Sequence[str] | None = None,
    threads: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One key after another, the flat int64 sums of the terms of some contributors, for `merge` by whoever has the others.

    scales: the plan for all contributors, the same wherever a part is summed. Keys that none of these has are left out.
    """
    given = sorted(contributions, key=lambda one: one.client)
    with lanes(threads) as among:
        for key in sorted(scales) if keys is None else keys:
            sums = _Sums(key, scales[key], among)
            holders = [one for one in given if key in one.keys]
            for one in holders:
                sums.add(one)
            if holders:
                yield key, sums.total


def merge(scale: Scale, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sums of one key over parts of its contributors, from those of each part, in any order.

    Raises FederatedError without parts, for parts of different sizes, or several where one contributor was planned for.
    """
    merged: torch.Tensor | None = None
    for part in parts:
        if merged is None:
            merged = part.clone()
        elif scale.rule == "alone" or part.shape != merged.shape:
            raise FederatedError(f"a part of {part.numel()} sums does not belong to the others, of {merged.numel()}")
        elif scale.rule == "mean":
            merged += part
        else:
            merged = torch.maximum(merged, part) if scale.rule == "most" else torch.minimum(merged, part)
    if merged is None:
        raise FederatedError("there is nothing to merge: no part was given")
    return merged


def mean_of(
    scale: Scale, sums: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], among: Lanes | None = None
) -> torch.Tensor:
    """The mean, of `shape`, from the sums of all contributors. float64 for dtype float64, float32 for other floating types."""
    if among is None:
        with lanes(1) as one:
            return mean_of(scale, sums, dtype, shape, one)
    return _mean(scale, sums, dtype, shape, None, among)[0]


def _mean(
    scale: Scale, sums: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], anchor: Chunked | None, among: Lanes
) -> tuple[torch.Tensor, float]:
    """The mean, and the L2 norm of it, or of the change from the anchor to it; 0 for integers."""
    mean = torch.empty(
        sums.numel(), dtype=dtype if dtype in (torch.float64,) or not dtype.is_floating_point else torch.float32
    )
    divisor = scale.factor(scale.total)

    def work(start: int, stop: int, scratch: Scratch) -> float:
        part = sums[start:stop]
        wide: Any = scratch.wide[: stop - start]
        if scale.rule == "alone":
            values = part.view(torch.float64)
            mean[start:stop].copy_(values)
            np.multiply(values.numpy(), divisor, out=wide)
        elif scale.rule == "mean":
            np.copyto(wide, part.numpy(), casting="same_kind")
            mean[start:stop].copy_(torch.from_numpy(np.divide(wide, divisor, out=scratch.other[: stop - start])))
        else:
            mean[start:stop].copy_(part)
            return 0.0
        return squares(wide if anchor is None else _change(anchor, divisor, wide, start, stop, scratch), scratch)

    size = float(np.sqrt(total(among.over(sums.numel(), work)))) / divisor
    return mean.reshape(tuple(shape)), size


def _change(anchor: Chunked, factor: float, scaled: Array, start: int, stop: int, scratch: Scratch) -> Array:
    """``anchor * factor - scaled``, in ``scratch.other``."""
    before = anchor.wide(start, stop, scratch.other, scratch)
    before *= factor
    before -= scaled
    return before


def _cosine(
    scale: Scale,
    own: float,
    tensor: Chunked,
    mean: Chunked,
    anchor: Chunked | None,
    lengths: tuple[float, float],
    among: Lanes,
) -> float:
    """Of a contributor's change and the mean change of one key, whose scaled norms are ``lengths``; 0 where one does not change."""
    if not all(lengths):
        return 0.0
    common = scale.factor(scale.total)

    def work(start: int, stop: int, scratch: Scratch) -> float:
        first = tensor.wide(start, stop, scratch.wide, scratch)
        first *= own
        if anchor is not None:
            first[:] = _change(anchor, own, first, start, stop, scratch)
        second = mean.wide(start, stop, scratch.other, scratch)
        second *= common
        if anchor is not None:
            before = anchor.wide(start, stop, scratch.spare, scratch)
            before *= common
            np.subtract(before, second, out=second)
        return product(first, second, scratch)

    return total(among.over(tensor.elements, work)) / lengths[0] / lengths[1]
