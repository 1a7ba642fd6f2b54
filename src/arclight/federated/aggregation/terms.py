"""The arithmetic of one key's fold, chunk by chunk: values become terms, terms a sum, the sum a mean.

A term is a value times its contributor's factor (see `scale`), as float64; rounded, it is an integer, and so are sums. What a
chunk's steps give does not depend on the order in which chunks, or the contributors of one, come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from arclight.federated.aggregation.chunks import Array, Chunked, Scratch
from arclight.federated.aggregation.scale import LARGEST, Contribution, Scale, is_mean, not_finite
from arclight.federated.errors import FederatedError, RefusedError


class Terms:
    """What is known of a key: how it is folded and, once contributors are admitted, its shape and type.

    anchor: where values are weights, those before; changes from it are told then, not the values.
    """

    def __init__(self, key: str, scale: Scale, anchor: Chunked | None = None) -> None:
        self.key, self.scale, self.anchor = key, scale, anchor
        self.divisor = scale.factor(scale.total)
        self.shape, self.elements, self.dtype = tuple[int, ...](), 0, torch.float32
        self._first = ""

    @property
    def averaged(self) -> bool:
        """Whether there is a mean, as there is of floating point; of integers one contributor's are taken."""
        return self.scale.rule in ("mean", "alone")

    @property
    def mean_dtype(self) -> torch.dtype:
        return torch.float32 if self.averaged and self.dtype is not torch.float64 else self.dtype

    def admit(self, given: Contribution, tensor: Chunked) -> None:
        """Raises RefusedError or FederatedError for a contributor's tensor that does not go with the others."""
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
        """No term may be larger than was planned for; ``size``, their sum of squares, tells at once that most are not."""
        if size <= LARGEST**2:
            return
        peak = float(np.abs(terms, out=scratch.spare[: len(terms)]).max())
        if not np.isfinite(peak):
            raise not_finite(given.client, self.key)
        if peak > LARGEST:
            raise FederatedError(f"{given.client} has larger values in {self.key} than were measured: measure it again")

    def to_change(self, scaled: Array, factor: float, start: int, scratch: Scratch) -> None:
        """Values times ``factor`` become ``anchor * factor`` minus them, in place."""
        assert self.anchor is not None
        before = self.anchor.wide(start, start + len(scaled), scratch.other, scratch)
        before *= factor
        np.subtract(before, scaled, out=scaled)

    def mean(self, total: Array, scratch: Scratch) -> Array:
        """The mean that a sum of all terms, as float64, stands for; in ``scratch.mean``."""
        return self.narrowed(np.divide(total, self.divisor, out=scratch.spare[: len(total)]), scratch)

    def narrowed(self, values: Array, scratch: Scratch) -> Array:
        """float64 values in the mean's own type; in ``scratch.mean``."""
        kept = np.float64 if self.dtype is torch.float64 else np.float32
        mean: Array = scratch.mean.view(kept)[: len(values)]
        np.copyto(mean, values, casting="same_kind")
        return mean

    def widened(self, mean: Array, start: int, scratch: Scratch) -> Array:
        """A chunk of the mean, or its change, times the divisor: what changes are compared with; in ``scratch.wide``."""
        wide = scratch.wide[: len(mean)]
        np.copyto(wide, mean)
        wide *= self.divisor
        if self.anchor is not None:
            self.to_change(wide, self.divisor, start, scratch)
        return wide


def add(terms: Array, sums: Array, scratch: Scratch, *, first: bool) -> None:
    """Add rounded terms to int64 sums, or begin these with them."""
    rounded = np.rint(terms, out=scratch.spare[: len(terms)])
    if first:
        np.copyto(sums, rounded, casting="unsafe")
    else:
        whole = scratch.whole[: len(terms)]
        np.copyto(whole, rounded, casting="unsafe")
        sums += whole


def sum_of(terms: Sequence[Array], scratch: Scratch) -> Array:
    """The exact sum of rounded terms, as float64, in ``scratch.wide``.

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
