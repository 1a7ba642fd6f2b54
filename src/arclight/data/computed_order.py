"""Sample in an order computed from the position, without ever making a list of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Sampler

from arclight.data.permutation import Ints, keys_of, permute_in_windows

PADDING = -1
"""The sample that fills the last batches up: the data set must answer it with one that counts for nothing."""
_CHUNK = 4096


@runtime_checkable
class ComputedOrder(Protocol):
    """Sampler that computes the samples at any positions of an epoch, which `EpochSampler` asks for."""

    def __len__(self) -> int: ...

    def sample_ids(self, positions: Ints, *, epoch: int, seed: int) -> Ints:
        """Return the samples of the data set at these positions, 0 to len - 1, of the epoch's global order."""
        ...


class EpochOrder(Sampler[int]):
    """All of ``size`` samples in every epoch, each exactly once; ``shuffle``: in an order of its own.

    window: samples that stay near each other (`permute_in_windows`); None: none.
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
        """Yield the epoch's order under seed 0, for a loader that knows samplers only as lists."""
        for start in range(0, len(self), _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, len(self)))
            yield from self.sample_ids(positions, epoch=self.epoch, seed=0).tolist()
