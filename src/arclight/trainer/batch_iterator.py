"""The iterator that a step gets which asks for ``dataloader_iter``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arclight.data.combined import Count


class BatchIterator:
    """Gives ``(batch, batch_idx, dataloader_idx)``; the step decides how many to take, and when.

    length: batches in all, infinity where it is not known. start: batches taken before, by the run that is resumed.
    """

    def __init__(self, batches: Iterator[tuple[Any, int, int]], length: Count, start: int = 0) -> None:
        self._batches = batches
        self.length = length
        self.fetched = start
        """Batches taken so far."""
        self.done = start >= length
        """Whether nothing is left to take, as far as is known."""
        self.batch: Any = None
        self.batch_idx = self.dataloader_idx = 0

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        try:
            newest = next(self._batches)
        except StopIteration:
            self.done = True
            raise
        self.batch, self.batch_idx, self.dataloader_idx = newest
        self.fetched += 1
        self.done = self.fetched >= self.length
        return newest

    def turns(self) -> Iterator[BatchIterator]:
        """Itself, once for every step that has something left to take."""
        while not self.done:
            yield self
