"""Mix corpora by weights that may change during training: a pure function of the position.

``text.data.data_module`` makes one for a recipe's ``mixture``; `sampling` asks it as a `ComputedOrder`. The sample at a position must not
change between versions, as runs resume in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from arclight.data.permutation import Ints, keys_of, permute, permute_in_windows
from arclight.fabric.errors import MisconfigurationError

_BLOCK = 1024
"""Samples of a block (at most an epoch's), in which each part has its share to within one sample."""
_ORDER, _ROUNDING, _PART = range(3)


class MixtureOrder(Sampler[int]):
    """Order of a mixture of parts, in which part ``p`` has the share ``weights[p]``.

    sizes: samples of each part, which are numbered one part after another. samples: of an epoch (default: all sizes
    together). window: samples of a part that stay near each other (`permute_in_windows`).
    weights: for each part a number, or one for each point ``at``, in epochs from the beginning of training;
    they change linearly between points and stay beyond them.

    Each part is read in orders of its own and begins a new one only when it has been read through (give or take a block
    of 1,024 samples, or of an epoch of fewer), however many epochs of the mixture that takes: a small corpus alone shows each
    sample once an epoch. The sample at a position depends on seed and position since the beginning of training alone: nothing
    else needs to be kept. The tables for that grow by 8 bytes for each part and block.
    Raises MisconfigurationError for weights that are negative, or all zero at some point, or if a part is empty.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float | Sequence[float]],
        *,
        at: Sequence[float] = (0.0,),
        samples: int | None = None,
        window: int | None = None,
    ) -> None:
        points = [[w] * len(at) if isinstance(w, int | float) else list(w) for w in weights]
        if len(points) != len(sizes) or any(len(row) != len(at) for row in points):
            raise MisconfigurationError(
                f"need a weight for each of {len(sizes)} parts at each of {len(at)} points, got {weights}"
            )
        table = np.array(points, np.float64)
        if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(0) > 0).all()):
            raise MisconfigurationError(f"weights must be 0 or more and not all 0 at any point, got {weights}")
        if list(at) != sorted(set(at)):
            raise MisconfigurationError(f"points must rise, got {list(at)}")
        if empty := [part for part, size in enumerate(sizes) if size < 1 and table[part].any()]:
            raise MisconfigurationError(f"parts {empty} have a weight but no samples")
        self.sizes, self.weights, self.at = list(sizes), table, list(at)
        self.samples = sum(sizes) if samples is None else samples
        self.window = window
        self._firsts = list(accumulate(sizes, initial=0))
        self._block = max(1, min(_BLOCK, self.samples))
        self._seed: int | None = None
        self._within = self._before = np.zeros((0, len(sizes) + 1), np.int64)
        self.epoch = 0

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield the epoch's order under seed 0, for a loader that knows samplers only as lists."""
        for start in range(0, self.samples, _BLOCK):
            positions = np.arange(start, min(start + _BLOCK, self.samples))
            yield from self.sample_ids(positions, epoch=self.epoch, seed=0).tolist()

    def sample_ids(self, positions: Ints, *, epoch: int, seed: int) -> Ints:
        block, slot = np.divmod(positions + epoch * self.samples, self._block)
        self._grow(int(block.max(initial=-1)) + 1, seed)
        rank = permute(slot, self._block, keys_of(seed, _ORDER, block))
        within = self._within[block]
        part = (rank[:, None] >= within[:, 1:]).sum(1)
        rows = np.arange(len(part))
        turn = self._before[block, part] + rank - within[rows, part]
        found: Ints = np.empty_like(turn)
        for number in np.unique(part).tolist():
            mine = part == number
            again, place = np.divmod(turn[mine], self.sizes[number])
            key = keys_of(seed, _PART + number, again)
            found[mine] = self._firsts[number] + permute_in_windows(place, self.sizes[number], key, self.window)
        return found

    def shares(self, epochs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the share of each part at moments of training, in epochs.

        Shape (moments, parts); rows sum to 1.
        """
        weights = np.stack([np.interp(epochs, self.at, row) for row in self.weights], axis=1)
        shares: npt.NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
        return shares

    def _grow(self, blocks: int, seed: int) -> None:
        """Compute each block's samples of each part, and how many there were before it."""
        if seed != self._seed:
            self._seed, self._within, self._before = seed, self._within[:0], self._before[:0]
        known = len(self._within)
        if blocks <= known:
            return
        new = np.arange(known, max(blocks, 2 * known, 64))
        # To a millionth of a sample, so that a part without a share gets none through the error of a sum.
        bounds = np.round(np.cumsum(self.shares((new + 0.5) * (self._block / self.samples)), axis=1) * self._block, 6)
        # Rounded with one random number for all parts of a block: each has its share on average, and none less than none.
        chance = keys_of(seed, _ROUNDING, new).astype(np.float64)[:, None] / 2.0**64
        within = np.floor(bounds + np.minimum(chance, 1 - 2**-20)).astype(np.int64)
        within[:, -1] = self._block
        within = np.concatenate([np.zeros((len(new), 1), np.int64), np.minimum(within, self._block)], axis=1)
        counts = np.diff(within, axis=1, append=self._block)
        start = self._before[-1] + np.diff(self._within[-1], append=self._block) if known else np.zeros_like(counts[0])
        before = start + np.cumsum(counts, axis=0) - counts
        self._within, self._before = np.concatenate([self._within, within]), np.concatenate([self._before, before])
