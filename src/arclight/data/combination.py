"""A combination of loaders that can start at any batch of any epoch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from arclight.data.combined import CombinedLoader, Count, Cursor, combined_length, side_by_side
from arclight.data.loader import ResumableLoader

_SNAPSHOTS = 4  # as many as a ResumableLoader keeps states of


class ResumableCombination:
    """The rows of a `CombinedLoader` by epoch and position, read through one resumable loader for each part.

    combined: of any mode but ``sequential``. parts: a resumable loader for each of ``combined.flattened``.

    Where every part can be reached at any batch at once, so can the combination. Else it keeps where each part stood
    after its newest rows (see `state_dict`); without such a state the parts are read up to the position.
    Raises ValueError for the ``sequential`` mode, whose parts are read one by one.
    """

    def __init__(self, combined: CombinedLoader, parts: Sequence[ResumableLoader]) -> None:
        if combined.mode == "sequential":
            raise ValueError(
                '`FitLoop` does not support `CombinedLoader(mode="sequential")`: training needs one stream'
            )
        self.mode, self.combined = combined.mode, combined
        self.parts = list(parts)
        self.limits: list[Count] | None = None
        self._places: deque[tuple[int, int, list[tuple[int, int]]]] = deque(maxlen=_SNAPSHOTS)
        self._pending: dict[str, Any] | None = None

    @property
    def seeds(self) -> list[int]:
        """Seeds of the parts."""
        return [part.seed for part in self.parts]

    @property
    def sized(self) -> bool:
        """Whether the number of rows is known before they are read."""
        return self.count() != math.inf

    def __len__(self) -> int:
        """Rows of an epoch on this rank; raises TypeError where that cannot be known."""
        count = self.count()
        if count == math.inf:
            raise TypeError(f"not all of the {len(self.parts)} combined loaders have a length")
        return int(count)

    def count(self) -> Count:
        """Rows of an epoch within the limits; infinity where that cannot be known."""
        return combined_length(self.mode, self._lengths(), self.limits)

    def batches(self, epoch: int, start: int = 0, *, cycle: int = 0, seed_epoch: int | None = None) -> Iterator[Any]:
        """Rows ``start, start + 1, ...`` of the epoch, each in the shape of the combined tree."""
        pending, self._pending = self._pending, None
        readers: list[Callable[[int, int], Iterator[Any]]] = [
            partial(_read, part, epoch, seed_epoch) for part in self.parts
        ]
        skip, limits = 0, self.limits or [math.inf] * len(self.parts)
        if pending is not None and (pending["epoch"], pending["batch"]) == (epoch, start):
            for part, state in zip(self.parts, pending["states"], strict=True):
                part.load_state_dict(state)
            places = [(int(c), int(b)) for c, b in pending["places"]]
        elif all(part.positioned for part in self.parts):
            places = [self._place(min(pair), start) for pair in zip(self._lengths(), limits, strict=True)]
        else:
            places, skip = [(0, 0)] * len(self.parts), start
        cursors = [Cursor(read, limit, *place) for read, limit, place in zip(readers, limits, places, strict=True)]
        return self._rows(cursors, epoch, start, skip)

    def _rows(self, cursors: list[Cursor], epoch: int, start: int, skip: int) -> Iterator[Any]:
        rebuild, keep = self.combined.rebuild, not all(part.positioned for part in self.parts)
        count = self.count()
        total = None if count == math.inf else max(0, int(count) - start + skip)
        for number, row in enumerate(islice(side_by_side(cursors, self.mode), total), start - skip + 1):
            if keep:
                self._places.append((epoch, number, [(cursor.cycle, cursor.batch) for cursor in cursors]))
            if number > start:
                yield rebuild(row)

    def place_of(self, epoch: int, batch: int) -> int | None:
        """None: parts of different lengths and batch sizes have no order in common."""

    def go_to(self, epoch: int, place: int) -> int | None:
        """None, see `place_of`."""

    def state_dict(self, batch: int | None = None, *, epoch: int | None = None) -> dict[str, Any]:
        """Where the parts stood after `batch` rows of `epoch` (default: the newest), up to three back.

        Empty where no state is needed. Raises ValueError for a row further back.
        """
        if not self._places:
            return dict(self._pending or {})
        if batch is None:
            epoch, batch, _ = self._places[-1]
        if batch == 0:
            states = [part.state_dict(0, epoch=epoch) for part in self.parts]
            return (
                {"epoch": epoch, "batch": 0, "places": [[0, 0]] * len(states), "states": states} if any(states) else {}
            )
        for known_epoch, number, places in reversed(self._places):
            if number == batch and epoch in (None, known_epoch):
                states = [
                    part.state_dict(position, epoch=known_epoch, cycle=cycle)
                    for part, (cycle, position) in zip(self.parts, places, strict=True)
                ]
                return {"epoch": known_epoch, "batch": number, "places": [list(p) for p in places], "states": states}
        raise ValueError(f"where the parts stood after batch {batch} is no longer known")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` gave, for the next `batches` call at that position."""
        self._pending = dict(state) or None
        self._places.clear()

    def _lengths(self) -> list[Count]:
        return [len(part) if part.sized else math.inf for part in self.parts]

    def _place(self, length: Count, start: int) -> tuple[int, int]:
        """Cycle and position of a part at row `start`."""
        if self.mode != "max_size_cycle" or length in (0, math.inf):
            return 0, start
        return divmod(start, int(length))


def _read(part: ResumableLoader, epoch: int, seed_epoch: int | None, cycle: int, start: int) -> Iterator[Any]:
    return part.batches(epoch, start, cycle=cycle, seed_epoch=seed_epoch)
