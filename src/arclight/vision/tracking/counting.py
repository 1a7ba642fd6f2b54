"""Count tracked objects that cross lines and that are in zones.

``arclight predict`` makes the counts (``--count-line``, ``--count-zone``) and updates them with each tracked frame; ``results.writers``
draws them and writes `to_json`, whose keys stay. Boxes must have track ids. Coordinates are pixels of the frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arclight.vision.results.detections import Detections

Points = NDArray[np.float64]

FORGET_AFTER = 300
"""Frames that a track not seen is remembered at least; the trackers forget it much sooner (`buffer`)."""


class _TrackRecord:
    """A note on each track, kept as long as it may come back."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[int, Any]] = {}
        self._frame = 0

    def next_frame(self) -> None:
        self._frame += 1
        if self._frame % FORGET_AFTER == 0:
            self._notes = {id: note for id, note in self._notes.items() if note[0] > self._frame - FORGET_AFTER}

    def get(self, id: int) -> Any:
        return self._notes.get(id, (0, None))[1]

    def set(self, id: int, note: Any) -> None:
        self._notes[id] = self._frame, note


class LineCount:
    """Objects whose centre crosses the line between two points, by class and direction.

    Directions are those of somebody who walks from the first point to the second: from the left hand to the right, or back.
    A track that touches the line has not crossed it until it is on the other side.
    """

    def __init__(self, points: ArrayLike) -> None:
        self.points = checked_points(points, 2, "a line")
        if not np.any(self.points[0] != self.points[1]):
            raise ValueError(f"a line needs two points, got {self.points[0].tolist()} twice")
        self.to_right, self.to_left = Counter[str](), Counter[str]()
        self._seen = _TrackRecord()

    def update(self, found: Detections) -> None:
        """Count the line crossings since the frame before.

        Raises ValueError for boxes without ids.
        """
        self._seen.next_frame()
        for id, label, centre in tracked(found):
            side = np.sign(_side(self.points[0], self.points[1], centre))
            before = self._seen.get(id)
            if before is not None and side and side != before[0]:
                if _meets(before[1], centre, *self.points):
                    (self.to_right if side > 0 else self.to_left)[label] += 1
                before = None
            if side:  # on the line it keeps the side that it comes from
                self._seen.set(id, (side, centre))
            elif before is not None:
                self._seen.set(id, before)

    def to_json(self) -> dict[str, dict[str, int]]:
        return {"to_right": dict(self.to_right), "to_left": dict(self.to_left)}

    def __str__(self) -> str:
        return f"{format_counts(self.to_right)} to the right, {format_counts(self.to_left)} to the left"


class ZoneCount:
    """Count of objects whose centre lies in a polygon: those in it now, and in all, by class."""

    def __init__(self, points: ArrayLike) -> None:
        self.points = checked_points(points, 3, "a zone", more=True)
        if crossing := _crossing(self.points):
            raise ValueError(
                f"the sides of a zone must not cross: side {crossing[0]} crosses side {crossing[1]}; order its corners"
            )
        self.inside, self.entered = Counter[str](), Counter[str]()
        self._seen = _TrackRecord()

    def update(self, found: Detections) -> None:
        """Count the objects of this frame. Raises ValueError for boxes without ids."""
        self._seen.next_frame()
        self.inside = Counter()
        for id, label, centre in tracked(found):
            within = _contains(self.points, centre)
            self.inside[label] += within
            entered = bool(self._seen.get(id))
            if within and not entered:
                self.entered[label] += 1
            self._seen.set(id, within or entered)

    def to_json(self) -> dict[str, dict[str, int]]:
        return {
            "inside": {label: count for label, count in self.inside.items() if count},
            "entered": dict(self.entered),
        }

    def __str__(self) -> str:
        return f"{format_counts(self.inside)} inside, {format_counts(self.entered)} in all"


Count = LineCount | ZoneCount


def tracked(found: Detections) -> list[tuple[int, str, Points]]:
    """List number, class and centre of each tracked box; ValueError for boxes without ids."""
    if found.ids is None:
        raise ValueError("only tracked objects can be counted: these boxes have no ids")
    return list(zip(found.ids.tolist(), found.labels, found.boxes.xywh[:, :2].astype(np.float64), strict=True))


def format_counts(counts: Counter[str]) -> str:
    """Format counts by class in words: "2 person, 1 dog", or "0"."""
    return ", ".join(f"{count} {label}" for label, count in sorted(counts.items()) if count) or "0"


def checked_points(points: ArrayLike, least: int, what: str, *, more: bool = False) -> Points:
    """Return points (n, 2); ValueError unless they are as many, and finite."""
    array = np.asarray(points, np.float64)
    wanted = f"{least} or more" if more else str(least)
    if array.ndim != 2 or array.shape[1] != 2 or len(array) < least or (len(array) > least and not more):
        raise ValueError(f"{what} has {wanted} points (x, y), got an array of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"the points of {what} must be finite, got {array.tolist()}")
    return array


def _side(start: Points, end: Points, point: Points) -> float:
    """Return twice the signed area of a triangle: above 0 if ``point`` is right of the line.

    Right: at the right hand of who walks from start to end, y down.
    """
    return float((end[0] - start[0]) * (point[1] - start[1]) - (end[1] - start[1]) * (point[0] - start[0]))


def _meets(a: Points, b: Points, c: Points, d: Points) -> bool:
    """Return True if the segments ab and cd intersect.

    a and b must lie on different sides of the line through cd.
    """
    return _side(a, b, c) * _side(a, b, d) <= 0


def _crossing(points: Points) -> tuple[int, int] | None:
    """Return the numbers, from 1, of two sides that cross, of a polygon; None if none do."""
    ends: Sequence[tuple[Points, Points]] = list(zip(points, np.roll(points, -1, axis=0), strict=True))
    for first in range(len(ends)):
        for second in range(first + 2, len(ends)):
            if first == 0 and second == len(ends) - 1:
                continue  # neighbours
            (a, b), (c, d) = ends[first], ends[second]
            if _side(a, b, c) * _side(a, b, d) < 0 and _side(c, d, a) * _side(c, d, b) < 0:
                return first + 1, second + 1
    return None


def _contains(points: Points, point: Points) -> bool:
    """Return True if the polygon contains ``point``, by ray casting."""
    (x, y), (x1, y1), (x2, y2) = point, points.T, np.roll(points, -1, axis=0).T
    spans = (y1 > y) != (y2 > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = x1 + (y - y1) * (x2 - x1) / (y2 - y1)
    return bool(np.count_nonzero(spans & (x < at)) % 2)
