"""The batch under way, and how many samples it counts for."""

from __future__ import annotations

from typing import Any

from arclight.fabric.batches import batch_size_of, batch_sizes
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn


class Batch:
    """The batch under way, whose size is counted only if a logged value needs it."""

    __slots__ = ("checked", "index", "known_size", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.known_size: int | None = None
        self.checked = False
        self.index = -1
        """Number of the newest batch that was begun, in its epoch; -1 before the first."""

    def set(self, value: Any) -> None:
        self.value, self.known_size = value, None

    def size(self) -> int:
        """Samples in the batch; 1 between batches, and for a batch without any tensor."""
        if self.known_size is None:
            self.known_size = 1 if self.value is None else batch_size_of(self.value)
        return self.known_size

    def weight(self) -> int:
        """The size, for a mean. Warns, once, where tensors differ in their first dimension.

        Raises MisconfigurationError for a batch without any tensor.
        """
        if not self.checked and self.value is not None:
            self._check()
            self.checked = True
        return self.size()

    def _check(self) -> None:
        sizes = list(dict.fromkeys(batch_sizes(self.value)))
        if not sizes:
            raise MisconfigurationError(
                f"We could not infer the batch_size of a batch of type {type(self.value).__name__}, which mean values are weighted "
                "by: give it, as in `self.log(..., batch_size=batch_size)`"
            )
        if len(sizes) > 1:
            rank_zero_warn(
                f"Trying to infer the `batch_size` from an ambiguous collection: its tensors have first dimensions {sizes[:4]}, "
                f"and {sizes[0]} is taken. To be sure, use `self.log(..., batch_size=batch_size)`",
                stacklevel=6,
            )
