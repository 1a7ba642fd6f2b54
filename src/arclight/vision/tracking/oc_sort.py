"""Track by OC-SORT: trust observations more than predictions of a filter (Cao et al. 2023).

``tracks.make_tracker`` makes one for each video; `Trackers` gives it the `Detections` of each frame, in order, and ids come back on them.
The same boxes must give the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from arclight.vision.results.detections import Detections
from arclight.vision.tracking.assignment import match, overlaps, with_ids
from arclight.vision.tracking.kalman import KalmanState, Motion, Vector, without_velocity

Box = NDArray[np.float64]


def area_and_ratio() -> Motion:
    """Return SORT's motion: centre, area and aspect ratio, of which the ratio has no velocity.

    Bewley et al. 2016; fixed noise.
    """
    F, H = np.eye(7), np.eye(4, 7)
    F[0, 4] = F[1, 5] = F[2, 6] = 1
    Q = np.diag([1, 1, 1, 1, 1e-2, 1e-2, 1e-4])
    R = np.diag([1.0, 1, 10, 10])
    P = np.diag([10.0, 10, 10, 10, 1e4, 1e4, 1e4])

    def measure(box: Vector) -> Vector:
        width, height = box[2] - box[0], box[3] - box[1]
        return np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, width * height, width / height])

    def to_box(x: Vector) -> Vector:
        width = np.sqrt(x[2] * x[3])
        half = np.array([width, x[2] / width]) / 2
        return np.concatenate((x[:2] - half, x[:2] + half))

    return Motion(F, H, measure, to_box, Q=lambda x: Q, R=lambda x: R, P=lambda x: P)


_MOTION = area_and_ratio()
_AREA, _AREA_SPEED = 2, 6

MIN_OVERLAP = 0.3
"""IoU below which a box and a track are not matched."""
DIRECTION_FRAMES = 3
"""Frames over which the direction of a motion is measured."""
DIRECTION_WEIGHT = 0.2
"""Weight of the agreement of directions beside overlap, whose weight is 1."""
MIN_HITS = 3
"""Frames in a row that confirm a track."""


@dataclass(eq=False)
class _Track:
    state: KalmanState
    label: int
    observations: dict[int, Box]
    """Frame to box, of the last few frames that showed it."""
    id: int | None = None
    hits: int = 1
    """Frames in a row that showed it."""
    before_loss: KalmanState | None = None
    """State at the last observation, until the next one: what the filter is run again from after a gap."""

    @property
    def last_seen(self) -> int:
        return next(reversed(self.observations))

    @property
    def last_box(self) -> Box:
        return self.observations[self.last_seen]

    def predict(self) -> None:
        self.state = _advanced(self.state)

    def update(self, box: Box, frame: int) -> None:
        gap = frame - self.last_seen
        if gap > 1 and self.before_loss is not None:
            self._update_again(box, gap)
        self.state = _MOTION.update(self.state, box)
        self.before_loss = None
        self.observations[frame] = box
        for old in [at for at in self.observations if at < frame - DIRECTION_FRAMES]:
            if len(self.observations) > 1:
                del self.observations[old]

    def miss(self) -> None:
        self.hits = 0

    def _update_again(self, box: Box, gap: int) -> None:
        """Re-update the filter after a gap, along a straight line from the last observation.

        This is the observation-centric re-update of the paper.
        """
        assert self.before_loss is not None
        state, last = self.before_loss, self.last_box
        for passed in range(1, gap):
            state = _MOTION.update(_advanced(state), _between(last, box, passed / gap))
        self.state = _advanced(state)

    def direction(self, box: Box, frame: int) -> Box:
        """Return the unit vector of the track's direction to ``box``, over ``DIRECTION_FRAMES``.

        It starts that many frames before ``frame``, or as near as is known.
        """
        wanted = [self.observations[at] for at in self.observations if at >= frame - DIRECTION_FRAMES and at < frame]
        return _unit(_centre(box) - _centre(wanted[0] if wanted else self.last_box))


def _advanced(state: KalmanState) -> KalmanState:
    if state.x[_AREA] + state.x[_AREA_SPEED] <= 0:
        state = without_velocity(state, _AREA_SPEED)
    return _MOTION.predict(state)


def _centre(box: Box) -> Box:
    return (box[:2] + box[2:]) / 2


def _unit(vector: Box) -> Box:
    return vector / (np.linalg.norm(vector) + 1e-6)


def _between(first: Box, last: Box, share: float) -> Box:
    """Return the box a share of the way: centre and size change steadily."""
    return first + (last - first) * share


@dataclass
class OCSort:
    """Follow the objects of one video; boxes are matched only to tracks of their class.

    A track is confirmed, and gets its number, by ``MIN_HITS`` frames in a row, or at once in the first ``MIN_HITS`` frames of the video.
    """

    confidence: float = 0.25
    """Confidence of the boxes that are used."""
    buffer: int = 30
    """Frames after which a track that is not seen is forgotten."""
    _tracks: list[_Track] = field(default_factory=list, repr=False)
    _count: int = 0
    _frame: int = 0

    def update(self, found: Detections, step: int = 1) -> Detections:
        """Return the boxes of this frame that belong to tracks, with their ``ids``.

        ``step``: frames since the one before.
        """
        self._frame += step
        self._tracks = [track for track in self._tracks if self._frame - track.last_seen <= self.buffer + 1]
        for track in self._tracks:
            if track.before_loss is None:
                track.before_loss = track.state
            for _ in range(step):
                track.predict()
        numbers = np.flatnonzero(found.boxes.conf >= self.confidence)
        boxes = found.boxes.xyxy.astype(np.float64)
        matched: dict[int, _Track] = {}
        left = self._match(self._tracks, numbers, found, boxes, matched, recover=False)
        lost = [track for track in self._tracks if track not in matched.values()]
        left = self._match(lost, left, found, boxes, matched, recover=True)
        for number, track in matched.items():
            track.hits += 1
            track.update(boxes[number], self._frame)
        for track in self._tracks:
            if track not in matched.values():
                track.miss()
        for number in left.tolist():
            track = _Track(_MOTION.start(boxes[number]), int(found.boxes.cls[number]), {self._frame: boxes[number]})
            self._tracks.append(track)
            matched[number] = track
        self._confirm(matched)
        self._tracks = [track for track in self._tracks if self._frame - track.last_seen <= self.buffer]
        return with_ids(found, {number: track.id for number, track in matched.items() if track.id is not None})

    def _match(
        self, tracks: list[_Track], numbers: NDArray[np.intp], found: Detections, boxes: Box, matched: dict[int, _Track],
        *, recover: bool,
    ) -> NDArray[np.intp]:  # fmt: skip
        """Match boxes to tracks by prediction and direction, or by last observation if ``recover``.

        Fills ``matched`` and returns the numbers of the boxes that are left.
        """
        if not tracks or not len(numbers):
            return numbers
        expected = [track.last_box if recover else _MOTION.box(track.state.x) for track in tracks]
        likeness = overlaps(np.array(expected), boxes[numbers])
        cost = -likeness if recover else -(likeness + self._agreement(tracks, numbers, found, boxes))
        impossible = (likeness < MIN_OVERLAP) | (
            np.array([track.label for track in tracks])[:, None] != found.boxes.cls[numbers]
        )
        cost[impossible] = np.inf
        return match(cost, 0.0, tracks, numbers, matched)

    def _agreement(self, tracks: list[_Track], numbers: NDArray[np.intp], found: Detections, boxes: Box) -> Box:
        """Return how well each box continues each track's direction, (n, m).

        This is the observation-centric momentum of the paper.
        """
        agreement = np.zeros((len(tracks), len(numbers)))
        for row, track in enumerate(tracks):
            if len(track.observations) < 2:
                continue  # it has gone no way yet
            own = track.direction(track.last_box, track.last_seen)
            for column, number in enumerate(numbers.tolist()):
                cosine = float(np.clip(own @ track.direction(boxes[number], self._frame), -1, 1))
                agreement[row, column] = (np.pi / 2 - np.arccos(cosine)) / np.pi * found.boxes.conf[number]
        return DIRECTION_WEIGHT * agreement

    def _confirm(self, matched: dict[int, _Track]) -> None:
        for _, track in sorted(matched.items()):
            if track.id is None and (track.hits >= MIN_HITS or self._frame <= MIN_HITS):
                self._count += 1
                track.id = self._count
