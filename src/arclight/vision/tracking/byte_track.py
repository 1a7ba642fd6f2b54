"""Track by ByteTrack: match confident boxes first, then doubtful ones (Zhang et al. 2022).

Doubtful boxes are for tracks that found no confident one.

``tracks.make_tracker`` makes one for each video; `Trackers` gives it the `Detections` of each frame, in order, and ids come back on them.
The same boxes must give the same ids, which tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arclight.vision.results.detections import Detections
from arclight.vision.tracking.assignment import match, overlaps, with_ids
from arclight.vision.tracking.kalman import KalmanState, Matrix, Motion, Vector, constant_velocity, without_velocity


def height_scaled() -> Motion:
    """Return DeepSORT's motion model: centre, aspect ratio and height.

    Its noise is in proportion to the height. Wojke et al. 2017; standard deviations of 1/20 of the height in position
    and 1/160 in velocity.
    """
    position, velocity = 1 / 20, 1 / 160
    F, H = constant_velocity(8, 4)

    def measure(box: Vector) -> Vector:
        width, height = box[2] - box[0], box[3] - box[1]
        return np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, width / height, height])

    def to_box(x: Vector) -> Vector:
        half = np.array([x[2] * x[3], x[3]]) / 2
        return np.concatenate((x[:2] - half, x[:2] + half))

    def diagonal(h: float, place: float, aspect: float, speed: float, aspect_speed: float) -> Matrix:
        of_place, of_speed = place * position * h, speed * velocity * h
        spread = [of_place, of_place, aspect, of_place, of_speed, of_speed, aspect_speed, of_speed]
        return np.diag(np.square(spread))

    return Motion(
        F, H, measure, to_box,
        Q=lambda x: diagonal(x[3], 1, 1e-2, 1, 1e-5),
        R=lambda x: np.diag(np.square([position * x[3], position * x[3], 1e-1, position * x[3]])),
        P=lambda x: diagonal(x[3], 2, 1e-2, 10, 1e-5),
    )  # fmt: skip


_MOTION = height_scaled()
_HEIGHT_SPEED = 7

_FIRST_LIMIT = 0.8
"""Largest cost of a confident box for a known track: one minus overlap times confidence."""
_SECOND_LIMIT = 0.5
"""Largest cost of a doubtful box for a track that found no confident one: one minus overlap."""
_NEW_LIMIT = 0.7
"""Largest cost of a confident box for a track that no second frame has confirmed: one minus overlap times confidence."""
_SAME_OVERLAP = 0.85
"""Overlap beyond which a lost track and one seen in this frame are the same object."""


@dataclass(eq=False)
class _Track:
    state: KalmanState
    label: int
    id: int | None = None
    """None until a second frame confirms it; tracks of the first frame have it at once."""
    seen: int = 1
    """Frames that it was seen in."""
    missed: int = 0
    """Frames since it was seen last."""

    @property
    def box(self) -> NDArray[np.float64]:
        return _MOTION.box(self.state.x)

    def predict(self) -> None:
        state = without_velocity(self.state, _HEIGHT_SPEED) if self.missed else self.state
        self.state = _MOTION.predict(state)
        self.missed += 1

    def update(self, box: NDArray[np.float64]) -> None:
        self.state = _MOTION.update(self.state, box)
        self.missed = 0
        self.seen += 1


@dataclass
class ByteTrack:
    """Follow the objects of one video; boxes are matched only to tracks of their class.

    A new track is confirmed, and gets its number, in the second frame in a row that shows it, or at once in the first frame.
    """

    high: float = 0.25
    """Confidence of the boxes that are matched first, and from which a box may begin a track."""
    low: float = 0.1
    """Confidence of the boxes that may carry a track on."""
    buffer: int = 30
    """Frames after which a track that is not seen is forgotten."""
    _tracks: list[_Track] = field(default_factory=list, repr=False)
    _count: int = 0
    _started: bool = False

    def update(self, found: Detections, step: int = 1) -> Detections:
        """Return the boxes of this frame that belong to tracks, with their ``ids``.

        ``step``: frames since the one before.
        """
        for _ in range(min(step, self.buffer + 2)):
            for track in self._tracks:
                track.predict()
        self._tracks = [
            track for track in self._tracks if track.missed <= self.buffer + 1
        ]  # frames may have been left out
        conf = found.boxes.conf
        high, low = np.flatnonzero(conf >= self.high), np.flatnonzero((conf < self.high) & (conf >= self.low))
        matched: dict[int, _Track] = {}
        known = [track for track in self._tracks if track.id is not None]
        left = self._match(known, high, found, _FIRST_LIMIT, matched, fused=True)
        # A doubtful box is believed where a track was a moment ago; what is lost for longer needs a better sign of itself.
        recent = [track for track in known if track not in matched.values() and track.missed <= step]
        self._match(recent, low, found, _SECOND_LIMIT, matched, fused=False)
        tentative = [track for track in self._tracks if track.id is None]
        left = self._match(tentative, left, found, _NEW_LIMIT, matched, fused=True)
        for number, track in matched.items():
            track.update(found.boxes.xyxy[number].astype(np.float64))
            if track.id is None:
                self._confirm(track)
        self._begin(left, found, matched)
        self._forget()
        ids = {number: track.id for number, track in matched.items() if track in self._tracks and track.id is not None}
        return with_ids(found, ids)

    def _match(
        self, tracks: list[_Track], numbers: NDArray[np.intp], found: Detections, limit: float, matched: dict[int, _Track],
        *, fused: bool,
    ) -> NDArray[np.intp]:  # fmt: skip
        """Match boxes to tracks, into ``matched``; returns the numbers of the boxes that are left."""
        boxes = found.boxes
        likeness = overlaps(np.array([track.box for track in tracks]), boxes.xyxy[numbers])
        cost = 1 - (likeness * boxes.conf[numbers] if fused else likeness)
        cost[np.array([track.label for track in tracks])[:, None] != boxes.cls[numbers]] = np.inf
        return match(cost, limit, tracks, numbers, matched)

    def _begin(self, numbers: NDArray[np.intp], found: Detections, matched: dict[int, _Track]) -> None:
        for number in numbers.tolist():
            box = found.boxes.xyxy[number].astype(np.float64)
            track = _Track(_MOTION.start(box), int(found.boxes.cls[number]))
            self._tracks.append(track)
            if not self._started:
                self._confirm(track)
                matched[number] = track
        self._started = True

    def _confirm(self, track: _Track) -> None:
        self._count += 1
        track.id = self._count

    def _forget(self) -> None:
        """Remove tracks lost for too long or never confirmed, and duplicates of a track.

        Of two tracks that are one object the one seen in fewer frames is removed, if both in as many the one seen now.
        """
        kept = [track for track in self._tracks if track.missed <= (self.buffer if track.id is not None else 0)]
        lost = [track for track in kept if track.missed and track.id is not None]
        seen = [track for track in kept if not track.missed and track.id is not None]
        same = (
            overlaps(np.array([track.box for track in lost]), np.array([track.box for track in seen])) > _SAME_OVERLAP
        )
        doubles = [
            lost[row] if lost[row].seen < seen[column].seen else seen[column]
            for row, column in zip(*same.nonzero(), strict=True)
            if lost[row].label == seen[column].label
        ]
        self._tracks = [track for track in kept if track not in doubles]
