"""Sum exactly in fixed point, as integers of at most 62 bits whose sum never overflows.

A term of the mean is ``round(x * weight * 2^shift)``, an int64; the product is taken in float64. The shift follows from the
largest ``|x|`` of all contributors and the sum of their weights, both known before the first term and the same in any
order. Rounding a term moves it by at most half a unit, which is at most 2^-60 of the tensor's largest value times the sum of weights; all
else is exact, so sums of parts, in any order and by any number of processes, are the same integers. (Of float64 tensors that
hold nothing above 2^-940, which no training makes, small values become zero: the factor itself must stay in range.)

`fold` sums each tensor by it; ``server.validation`` and ``privacy`` measure updates with it, and ``server.secure_sums`` takes the mean of a
secure sum by its `Scale`. Shift and rounding decide the bits of every round: changing them changes seeded runs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from arclight.federated.aggregation.chunks import (
    Array,
    ChunkedTensor,
    ChunkWorkers,
    Scratch,
    chunk_workers,
    squares,
    total,
)
from arclight.federated.aggregation.statistics import PREFIX
from arclight.federated.errors import FederatedError, RefusedError

Form = Literal["delta", "weights"]
"""Whether contributions are changes of weights or weights."""
Rule = Literal["mean", "alone", "most", "least"]
"""Weighted mean; the values of an only contributor; the largest or the smallest integer."""

BITS = 61
"""Bits of the sum of all terms' sizes; one more holds what their rounding adds, the last is the sign."""

LARGEST = 2.0 ** (BITS + 1)
"""Largest size of a term that is not refused as larger than measured."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One client's contribution to a mean."""

    client: str
    """Name of the client, or another text that is unique in the mean."""
    weight: float
    """Its weight, positive: samples, tokens, or 1."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Decoded tensors by key. Each is read when its turn comes, up to three times, and then released; a `StoredTensor` is read in
    parts."""
    largest: Mapping[str, float | None] | None = None
    """Largest size of a value by key, None for integers, as `measure` gave it; without it every tensor is read once more."""
    samples: float | None = None
    """Samples that its change comes from, for the noise scale; the weight if not given."""

    norm: float | None = None
    """L2 norm of its change, over ``model/`` keys, if it is known already."""
    scale: float = 1.0
    """What its ``model/`` tensors are multiplied by, in (0, 1]; the weight stays. For norm bounds and stale updates."""

    @property
    def keys(self) -> set[str]:
        return set(self.tensors if self.largest is None else self.largest)


def uneven(given: Sequence[Contribution], prefix: str = "") -> tuple[str, ...]:
    """Return the clients that sent other keys with this prefix than most did.

    Of equally many, those that sent more keys are taken as most.
    """
    sent = {one.client: frozenset(key for key in one.keys if key.startswith(prefix)) for one in given}
    counts = Counter(sent.values())
    usual = max(counts, key=lambda keys: (counts[keys], len(keys), sorted(keys)), default=frozenset())
    return tuple(client for client, keys in sent.items() if keys != usual)


@dataclass(frozen=True, kw_only=True)
class TensorMagnitudes:
    """Largest magnitudes and norms of a client's tensors, as validation measures them."""

    largest: dict[str, float | None]
    """Largest magnitude of a value by key; None for tensors of integers."""
    norms: dict[str, float]
    """L2 norm by key, of tensors of floating point."""

    def norm(self, prefix: str = PREFIX) -> float:
        """Return the L2 norm of all tensors whose keys have this prefix."""
        return math.hypot(*(norm for key, norm in self.norms.items() if key.startswith(prefix)))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Rule, shift and total weight with which one tensor is averaged."""

    rule: Rule
    """Mean of several; the only contributor's values themselves; the largest or smallest of integers (see `fold`)."""
    shift: int
    """Terms are in units of 2^-shift."""
    total: float
    """Sum of the contributors' weights, rounded once."""

    def factor_for(self, given: Contribution, key: str) -> float:
        """Return the factor that turns one contributor's values of a key into terms."""
        return self.factor(given.weight * given.scale if key.startswith(PREFIX) else given.weight)

    def factor(self, weight: float) -> float:
        """Return the factor of a weight: the weight, shifted."""
        return math.ldexp(weight, self.shift)


def scale_of(
    weights: Iterable[float], largest: Iterable[float | None], form: Form = "delta", scaled: bool = False
) -> Scale:
    """Return the fixed-point scale of one tensor from all weights and largest values.

    Contributors may come in any order.
    scaled: whether some contributor's values are multiplied first, so that even a single one's do not come out as they are.
    """
    weighed, sizes = list(weights), list(largest)
    together = total(weighed)
    if any(size is None for size in sizes):
        if not all(size is None for size in sizes):
            raise FederatedError("some contributors have integers where others have floating point")
        return Scale(rule="most" if form == "weights" else "least", shift=0, total=together)
    peak = max((size for size in sizes if size is not None), default=0.0)
    exponent = math.frexp(together)[1]
    shift = BITS - math.frexp(peak)[1] - exponent if peak else 0
    return Scale(
        rule="mean" if len(sizes) > 1 or scaled else "alone", shift=min(shift, 1000 - exponent), total=together
    )


def plan(
    contributions: Iterable[Contribution],
    form: Form = "delta",
    *,
    values: Iterable[str] = (),
    threads: int | None = None,
) -> dict[str, Scale]:
    """Return the scale of every key; only tensors that were not measured before are read.

    values: keys that hold values themselves although ``form`` is "delta". Raises FederatedError for a contributor that is named
    twice, RefusedError for a weight that is not positive or a value that is not finite.
    """
    by_key: dict[str, list[tuple[float, float | None]]] = {}
    scaled = set[str]()
    seen, whole = set[str](), set(values)
    for given in contributions:
        if given.client in seen:
            raise FederatedError(
                f"{given.client} contributes twice to one mean: give each contribution a name of its own"
            )
        seen.add(given.client)
        if not (given.weight > 0 and math.isfinite(given.weight)):
            why = f"{given.client} weighs {given.weight}: a weight is a positive, finite number"
            raise RefusedError("weight", why, (given.client,))
        if not 0 < given.scale <= 1:
            raise FederatedError(f"{given.client} would be scaled by {given.scale}: a factor in (0, 1]")
        largest = given.largest if given.largest is not None else measure(given.client, given.tensors, threads).largest
        for key, size in largest.items():
            if size is not None and not math.isfinite(size):
                raise not_finite(given.client, key)
            by_key.setdefault(key, []).append((given.weight, size))
            if given.scale != 1 and key.startswith(PREFIX):
                scaled.add(key)
    scales = {}
    for key, of_key in sorted(by_key.items()):
        try:
            weights, sizes = zip(*of_key, strict=True)
            scales[key] = scale_of(weights, sizes, "weights" if key in whole else form, key in scaled)
        except FederatedError as error:
            raise FederatedError(f"{key}: {error}") from error
    return scales


def measure(client: str, tensors: Mapping[str, torch.Tensor], threads: int | None = None) -> TensorMagnitudes:
    """Measure a client's tensors, each read once.

    Raises RefusedError for NaN or infinite values.
    """
    largest, norms = dict[str, float | None](), dict[str, float]()
    with chunk_workers(threads) as workers:
        for key in tensors:
            tensor = ChunkedTensor(tensors[key])
            if is_mean(client, key, tensor.dtype):
                largest[key], norms[key] = _measure(client, key, tensor, workers)
            else:
                largest[key] = None
    return TensorMagnitudes(largest=largest, norms=norms)


def _measure(client: str, key: str, tensor: ChunkedTensor, workers: ChunkWorkers) -> tuple[float, float]:
    def work(start: int, stop: int, scratch: Scratch) -> tuple[float, float]:
        values = tensor.wide(start, stop, scratch.wide, scratch)
        size = float(np.abs(values, out=scratch.other[: len(values)]).max())
        if not math.isfinite(size):
            raise not_finite(client, key)
        exponent = math.frexp(size)[1]
        if abs(exponent) > 200:  # squares of such numbers could leave float64's range
            values = np.ldexp(values, -exponent, out=values)
            return size, float(np.ldexp(math.sqrt(squares(values, scratch)), exponent))
        return size, math.sqrt(squares(values, scratch))

    parts = workers.map_chunks(tensor.elements, work)
    return max((size for size, _ in parts), default=0.0), min(
        math.hypot(*(norm for _, norm in parts)), sys.float_info.max
    )


def is_mean(client: str, key: str, dtype: torch.dtype) -> bool:
    """Return True if tensors of this type are averaged; integers are not.

    Raises RefusedError for other types.
    """
    if dtype.is_complex or dtype is torch.uint64:
        why = f"{client} sent {key} as {dtype}: it cannot be averaged, send another type"
        raise RefusedError("wrong_shape", why, (client,))
    return dtype.is_floating_point


def has_changes(dtype: torch.dtype) -> bool:
    """Return True for types whose differences are averaged.

    They are floating point, and integers that torch subtracts.
    """
    return not dtype.is_complex and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def not_finite(client: str, key: str) -> RefusedError:
    return RefusedError("not_finite", f"{client} sent {key} with a value that is not finite", (client,))


class Terms:
    """Fixed-point arithmetic of one key: values to terms, terms to a sum, the sum to a mean.

    All is done chunk by chunk.
    anchor: if values are weights, those before; changes from it are measured then, not the values.
    """

    def __init__(self, key: str, scale: Scale, anchor: ChunkedTensor | None = None) -> None:
        self.key, self.scale, self.anchor = key, scale, anchor
        self.divisor = scale.factor(scale.total)
        self.shape, self.elements, self.dtype = tuple[int, ...](), 0, torch.float32
        self._first = ""

    @property
    def averaged(self) -> bool:
        """True for floating point, which is averaged; of integers one contributor's are taken."""
        return self.scale.rule in ("mean", "alone")

    @property
    def mean_dtype(self) -> torch.dtype:
        return torch.float32 if self.averaged and self.dtype is not torch.float64 else self.dtype

    def admit(self, given: Contribution, tensor: ChunkedTensor) -> None:
        """Admit a contributor's tensor.

        Raises RefusedError or FederatedError if it does not fit the others.
        """
        if is_mean(given.client, self.key, tensor.dtype) != self.averaged:
            raise RefusedError(
                "wrong_shape",
                f"{given.client} sent {self.key} as {tensor.dtype}, others differ in kind",
                (given.client,),
            )
        if not self._first:
            self._first, self.shape, self.elements = given.client, tensor.shape, tensor.elements
            self.dtype = tensor.dtype
        elif self.scale.rule == "alone":
            raise FederatedError(f"{self.key}: {given.client} is one more contributor than was planned for")
        for what, other in ((given.client, tensor), ("the server", self.anchor)):
            if other is not None and other.shape != self.shape:
                raise RefusedError(
                    "wrong_shape",
                    f"{what} has {self.key} of {other.shape}, {self._first} of {self.shape}",
                    (given.client,),
                )
        if tensor.dtype is torch.float64:
            self.dtype = torch.float64

    def factor(self, given: Contribution) -> float:
        return self.scale.factor_for(given, self.key)

    def check(self, given: Contribution, size: float, terms: Array, scratch: Scratch) -> None:
        """Check that no term is larger than planned.

        ``size``, the terms' sum of squares, usually shows it at once.
        """
        if size <= LARGEST**2:
            return
        peak = float(np.abs(terms, out=scratch.spare[: len(terms)]).max())
        if not np.isfinite(peak):
            raise not_finite(given.client, self.key)
        if peak > LARGEST:
            raise FederatedError(f"{given.client} has larger values in {self.key} than were measured: measure it again")

    def to_change(self, scaled: Array, factor: float, start: int, scratch: Scratch) -> None:
        """Turn values times ``factor`` into ``anchor * factor`` minus them, in place."""
        assert self.anchor is not None
        before = self.anchor.wide(start, start + len(scaled), scratch.other, scratch)
        before *= factor
        np.subtract(before, scaled, out=scaled)

    def mean(self, total: Array, scratch: Scratch) -> Array:
        """Return the mean of a sum of all terms, given as float64; in ``scratch.mean``."""
        return self.narrowed(np.divide(total, self.divisor, out=scratch.spare[: len(total)]), scratch)

    def narrowed(self, values: Array, scratch: Scratch) -> Array:
        """Convert float64 values to the mean's own type; in ``scratch.mean``."""
        kept = np.float64 if self.dtype is torch.float64 else np.float32
        mean: Array = scratch.mean.view(kept)[: len(values)]
        np.copyto(mean, values, casting="same_kind")
        return mean

    def widened(self, mean: Array, start: int, scratch: Scratch) -> Array:
        """Return a chunk of the mean times the divisor in ``scratch.wide``, to compare changes with.

        With an anchor it is the change of the mean.
        """
        wide = scratch.wide[: len(mean)]
        np.copyto(wide, mean)
        wide *= self.divisor
        if self.anchor is not None:
            self.to_change(wide, self.divisor, start, scratch)
        return wide


def add(terms: Array, sums: Array, scratch: Scratch, *, first: bool) -> None:
    """Add rounded terms to int64 sums, or start these with them."""
    rounded = np.rint(terms, out=scratch.spare[: len(terms)])
    if first:
        np.copyto(sums, rounded, casting="unsafe")
    else:
        whole = scratch.whole[: len(terms)]
        np.copyto(whole, rounded, casting="unsafe")
        sums += whole


def sum_of(terms: Sequence[Array], scratch: Scratch) -> Array:
    """Return the exact sum of rounded terms, as float64, in ``scratch.wide``.

    Of two, float64's own sum is the exact one rounded once: the same number that the sum of integers becomes.
    """
    count = len(terms[0])
    total = scratch.wide[:count]
    if len(terms) == 2:
        np.rint(terms[0], out=total)
        total += np.rint(terms[1], out=scratch.spare[:count])
        total += 0.0  # no integer is -0.0
        return total
    sums = scratch.sums[:count]
    for number, one in enumerate(terms):
        add(one, sums, scratch, first=number == 0)
    np.copyto(total, sums, casting="same_kind")
    return total
