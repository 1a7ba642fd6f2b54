"""Aggregate robustly against a few hostile clients: median, trimmed mean, Krum, norm bounds.

Each stands where a `Fold` stands and, like it, has the same bits for any order of the clients and any number of threads.
Median and trimmed mean hold one key's tensors of all clients at a time, and of tensors that lie in files only parts of 2 MB;
Krum reads every tensor once more, and compares each pair of clients: its time grows with the square of their number.

`server_run` lets `StrategyStep` make one of these in place of a `Fold` if the settings ask for it; `noise` clips by `bounded`. A new one needs
a class in `settings.Robust` and a case in `fold_maker`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from arclight.federated.aggregation.chunks import (
    CHUNK,
    Array,
    ChunkedTensor,
    ChunkWorkers,
    Scratch,
    chunk_workers,
    product,
    squares,
    total,
)
from arclight.federated.aggregation.fixed_point import Contribution, Form, is_mean, measure, not_finite, uneven
from arclight.federated.aggregation.fold import Fold, SinkFactory
from arclight.federated.aggregation.statistics import PREFIX
from arclight.federated.errors import FederatedError, RefusedError
from arclight.federated.privacy.settings import Krum, Median, NormBound, Robust, Trimmed

log = logging.getLogger(__name__)

_ROWS = 8 * CHUNK
"""Elements, of all clients together, that are compared at a time."""


def fold_maker(robust: Robust | None) -> Callable[..., Fold]:
    """Return the maker of a round's fold, called as `Fold` is."""
    match robust:
        case None:
            return Fold
        case Median() | Trimmed():
            return partial(OrderedFold, robust)
        case Krum():
            return partial(_krum, robust)
        case NormBound():
            return partial(_bounded, robust)


def _krum(
    settings: Krum, contributions: Iterable[Contribution], form: Form = "delta", *, scales: Any = None, **more: Any
) -> Fold:
    return Fold(closest(contributions, settings, threads=more.get("threads")), form, **more)


def _bounded(
    settings: NormBound, contributions: Iterable[Contribution], form: Form = "delta", *, scales: Any = None, **more: Any
) -> Fold:
    if form != "delta":
        raise FederatedError('norm bounds are for changes: set send = "delta"')
    return Fold(bounded(contributions, settings, threads=more.get("threads")), form, **more)


def bounded(
    contributions: Iterable[Contribution], settings: NormBound, threads: int | None = None
) -> list[Contribution]:
    """Return the contributions with those scaled down whose changes are longer than the bound.

    If most have not moved at all, the median bounds every change by zero: what others sent is left out of the mean.
    """
    given = list(contributions)
    norms = [measure(one.client, one.tensors, threads).norm() if one.norm is None else one.norm for one in given]
    bound = settings.times * median(norms) if settings.largest is None else settings.largest
    if bound == 0:
        still = [one for one, norm in zip(given, norms, strict=True) if norm == 0]
        if out := sorted({one.client for one in given} - {one.client for one in still}):
            log.warning(
                "half of the round's changes or more are zero, which bounds all others by zero: %s count for nothing; "
                "robust.largest sets a bound of its own",
                ", ".join(out),
            )
        return still
    return [
        replace(one, scale=one.scale * (bound / norm)) if norm > bound else one
        for one, norm in zip(given, norms, strict=True)
    ]


class OrderedFold(Fold):
    """Median or trimmed mean of each value; weights of the contributions do not count.

    A key's only holder gives it as it is.
    """

    def __init__(
        self, settings: Median | Trimmed, contributions: Iterable[Contribution], *rest: Any, **more: Any
    ) -> None:
        super().__init__(contributions, *rest, **more)
        self._settings = settings

    def each(self, key: str, workers: ChunkWorkers, into: SinkFactory) -> None:
        if self.scales[key].rule != "mean":
            super().each(key, workers, into)
            return
        holders = self._holders(key)
        tensors = [ChunkedTensor(given.tensors[key]) for given in holders]
        _check_alike(key, holders, tensors)
        anchor = ChunkedTensor(self._anchor[key]) if key in self._of_values and key in self._anchor else None
        wide = any(tensor.dtype is torch.float64 for tensor in tensors)
        dtype = torch.float64 if wide else torch.float32
        take = into(dtype, tensors[0].shape)
        clients = [given.client for given in holders]

        def work(start: int, stop: int, scratch: Scratch) -> list[list[float]]:
            found: list[list[float]] = []
            for first, last in _parts(start, stop, len(tensors)):
                rows = _rows(key, clients, tensors, first, last, scratch)
                middle = self._middle(np.sort(rows, axis=0))
                take(first, last, torch.from_numpy(middle).to(dtype), scratch)
                if anchor is not None:
                    before = anchor.wide(first, last, scratch.wide, scratch)
                    rows, middle = before - rows, before - middle
                norms = [squares(row, scratch) for row in (middle, *rows)]
                found.append(norms + [product(row, middle, scratch) for row in rows])
            return found

        parts = [sums for chunk in workers.map_chunks(tensors[0].elements, work) for sums in chunk]
        sums = [total(column) for column in zip(*parts, strict=True)] or [0.0] * (2 * len(clients) + 1)
        norms = [math.sqrt(value) for value in sums[: len(clients) + 1]]
        self._gathered.mean(key, norms[0])
        for client, norm, crossed in zip(clients, norms[1:], sums[len(clients) + 1 :], strict=True):
            self._gathered.client(key, client, norm)
            if self._gathered.counts(key):
                self._gathered.product(key, client, crossed / (norm * norms[0]) if norm and norms[0] else 0.0)

    def _middle(self, ordered: Array) -> Array:
        """Reduce rows that are sorted column by column."""
        count = len(ordered)
        match self._settings:
            case Median():
                cut = (count - 1) // 2
            case Trimmed(share=share):
                cut = math.floor(share * count)
        kept: Array = ordered[cut : count - cut]
        middle: Array = np.add.reduce(kept / len(kept), axis=0)
        return middle


def closest(contributions: Iterable[Contribution], settings: Krum, threads: int | None = None) -> list[Contribution]:
    """Return the ``keep`` contributions with the smallest Krum scores.

    The score is the sum of squared distances to the nearest n - byzantine - 2 others.

    Distances are over all ``model/`` tensors of floating point, which all must have. Raises FederatedError for too few.
    """
    given = sorted(contributions, key=lambda one: one.client)
    count, least = len(given), 2 * settings.byzantine + 3
    if count < least:
        raise FederatedError(
            f"Krum against {settings.byzantine} byzantine clients needs {least} updates, the round has {count}: "
            "raise the quorum, or lower robust.byzantine"
        )
    if settings.keep > count - settings.byzantine:
        raise FederatedError(
            f"Krum cannot keep {settings.keep} of {count} updates of which {settings.byzantine} may be anything"
        )
    distances = _distances(given, threads)
    nearest = np.sort(distances, axis=1)[:, 1 : count - settings.byzantine - 1]  # the first is its own
    scores = [total(row) for row in nearest.tolist()]
    return [given[k] for k in sorted(range(count), key=lambda k: (scores[k], given[k].client))[: settings.keep]]


def _distances(given: list[Contribution], threads: int | None) -> Array:
    """Return squared L2 distances, (n, n)."""
    distances = np.zeros((len(given), len(given)))
    clients = [one.client for one in given]
    if strangers := uneven(given, PREFIX):
        why = f"Krum compares whole updates: {', '.join(strangers)} sent other tensors than the others"
        raise RefusedError("wrong_names", why, strangers)
    keys = sorted(key for key in given[0].keys if key.startswith(PREFIX))
    with chunk_workers(threads) as workers:
        for key in keys:
            tensors = [ChunkedTensor(one.tensors[key]) for one in given]
            _check_alike(key, given, tensors)
            if not tensors[0].dtype.is_floating_point:
                continue

            for found in workers.map_chunks(tensors[0].elements, partial(_pairs, key, clients, tensors)):
                distances += found
    return distances + distances.T


def _pairs(
    key: str, clients: list[str], tensors: list[ChunkedTensor], start: int, stop: int, scratch: Scratch
) -> Array:
    """Return squared distances in one chunk, below the diagonal."""
    found = np.zeros((len(tensors), len(tensors)))
    for first, last in _parts(start, stop, len(tensors)):
        rows = _rows(key, clients, tensors, first, last, scratch)
        for one in range(len(rows)):
            for other in range(one):
                between = np.subtract(rows[one], rows[other], out=scratch.wide[: last - first])
                found[one, other] += squares(between, scratch)
    return found


def _parts(start: int, stop: int, clients: int) -> list[tuple[int, int]]:
    step = max(256, min(CHUNK, _ROWS // clients))
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def _rows(key: str, clients: list[str], tensors: list[ChunkedTensor], first: int, last: int, scratch: Scratch) -> Array:
    """Return all clients' values of one part, (clients, elements).

    Raises RefusedError for NaN or infinite ones.
    """
    rows = np.empty((len(tensors), last - first))
    for client, tensor, row in zip(clients, tensors, rows, strict=True):
        tensor.wide(first, last, row, scratch)
        if not np.isfinite(row).all():
            raise not_finite(client, key)
    return rows


def _check_alike(key: str, holders: list[Contribution], tensors: list[ChunkedTensor]) -> None:
    for given, tensor in zip(holders, tensors, strict=True):
        if tensor.shape != tensors[0].shape:
            raise RefusedError(
                "wrong_shape",
                f"{given.client} has {key} of {tensor.shape}, {holders[0].client} of {tensors[0].shape}",
                (given.client,),
            )
        if is_mean(given.client, key, tensor.dtype) != tensors[0].dtype.is_floating_point:
            why = f"{given.client} sent {key} as {tensor.dtype}, others differ in kind"
            raise RefusedError("wrong_shape", why, (given.client,))
