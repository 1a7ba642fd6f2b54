"""Compute the order of samples from the position, without a list of all samples.

The loader's sampler (`sampling`) asks a `ComputedOrder` for the samples at positions; `EpochOrder` and `mixture` are such, and
``text.data.data_module`` uses both. The order of a seed and epoch is part of exact resuming: `sample_ids` must not change between versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Sampler

from arclight.data.permutation import Ints, keys_of, permute_in_windows

PADDING = -1
"""Sample id that pads the last batches; the data set must return a sample for it that has no labels."""
_CHUNK = 4096


@runtime_checkable
class ComputedOrder(Protocol):
    """Protocol of samplers that compute the samples at any positions of an epoch."""

    def __len__(self) -> int: ...

    def sample_ids(self, positions: Ints, *, epoch: int, seed: int) -> Ints:
        """Return the samples at these positions (0 to len - 1) of the epoch's global order."""
        ...


class EpochOrder(Sampler[int]):
    """Order of ``size`` samples, each once per epoch; a new one each epoch with ``shuffle``.

    window: number of consecutive samples that are shuffled among themselves (`permute_in_windows`); None: all.
    """

    def __init__(self, size: int, shuffle: bool = True, window: int | None = None) -> None:
        self.size, self.shuffle, self.window, self.epoch = size, shuffle, window, 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample_ids(self, positions: Ints, *, epoch: int, seed: int) -> Ints:
        return (
            permute_in_windows(positions, self.size, keys_of(seed, epoch), self.window) if self.shuffle else positions
        )

    def __iter__(self) -> Iterator[int]:
        """Yield the epoch's order for seed 0, for loaders that only iterate over samplers."""
        for start in range(0, len(self), _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, len(self)))
            yield from self.sample_ids(positions, epoch=self.epoch, seed=0).tolist()
