"""Moving scenes as boxes: objects that drift, turn and hide behind one another, and what a detector would see of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from arclight.vision import Detections
from arclight.vision.tracking.mot_metrics import TrackingScores, score_tracks
from arclight.vision.tracking.tracks import Tracker

NAMES = ("person", "bag")
WIDTH, HEIGHT = 640, 480
HIDDEN = 0.4
"""Share of a box that is seen below which a detector misses it."""


@dataclass(frozen=True)
class Scene:
    """True boxes (frames, objects, 4), and what a detector finds: (box, confidence, object or -1 for noise) by frame."""

    boxes: np.ndarray
    labels: np.ndarray
    visible: np.ndarray
    """(frames, objects) share of each box in front of which nothing stands."""
    found: list[list[tuple[np.ndarray, float, int]]]

    @classmethod
    def drawn(cls, seed: int, objects: int = 8, frames: int = 150) -> Scene:
        """Objects that walk at up to 4 pixels a frame, turn at the edges, and pass behind each other and behind a pillar."""
        random = np.random.default_rng(seed)
        size = np.stack((random.uniform(30, 60, objects), random.uniform(70, 130, objects)), axis=1)
        centre = np.stack((random.uniform(60, WIDTH - 60, objects), random.uniform(120, HEIGHT - 120, objects)), axis=1)
        speed = random.uniform(1, 4, (objects, 2)) * random.choice([-1, 1], (objects, 2)) * [1, 0.4]
        boxes = np.empty((frames, objects, 4))
        for frame in range(frames):
            centre = centre + speed
            speed = np.where((centre < 50) | (centre > np.array([WIDTH, HEIGHT]) - 50), -speed, speed)
            centre = centre.clip(50, np.array([WIDTH, HEIGHT]) - 50)
            boxes[frame] = np.concatenate((centre - size / 2, centre + size / 2), axis=1)
        visible = _visible(boxes)
        labels = np.arange(objects) % len(NAMES)
        found = [list(_seen(boxes[frame], visible[frame], random)) for frame in range(frames)]
        return cls(boxes, labels, visible, found)


PILLAR = (300.0, 0.0, 340.0, float(HEIGHT))


def _visible(boxes: np.ndarray) -> np.ndarray:
    """Whose feet are lower stands in front; the pillar stands before all."""
    frames, objects = boxes.shape[:2]
    shares = np.ones((frames, objects))
    for frame in range(frames):
        ground = np.zeros((HEIGHT, WIDTH), int) - 1
        for number in np.argsort(boxes[frame, :, 3]):
            left, top, right, bottom = boxes[frame, number].round().astype(int)
            ground[max(top, 0) : bottom, max(left, 0) : right] = number
        left, top, right, bottom = map(int, PILLAR)
        ground[top:bottom, left:right] = -2
        for number in range(objects):
            left, top, right, bottom = boxes[frame, number].round().astype(int)
            shares[frame, number] = (ground[max(top, 0) : bottom, max(left, 0) : right] == number).mean()
    return shares


def _seen(
    boxes: np.ndarray, visible: np.ndarray, random: np.random.Generator
) -> Iterator[tuple[np.ndarray, float, int]]:
    """Boxes with a jitter of 2 % of their size; half-hidden ones with little confidence, some missed, and a false one at times."""
    for number, (box, share) in enumerate(zip(boxes, visible)):
        if share < HIDDEN or random.random() < 0.03:
            continue
        sides = box + random.normal(0, 0.02, 4) * np.tile(box[2:] - box[:2], 2)
        yield sides, float(np.clip(0.15 + 0.75 * share + random.normal(0, 0.04), 0.05, 0.99)), number
    if random.random() < 0.1:
        corner = random.uniform(0, 400, 2)
        yield np.concatenate((corner, corner + random.uniform(30, 80, 2))), float(random.uniform(0.1, 0.6)), -1


def found_in(scene: Scene) -> Iterator[Detections]:
    """The boxes of each frame as a detector would give them."""
    for frame in scene.found:
        labels = [0 if number < 0 else int(scene.labels[number]) for _, _, number in frame]
        yield Detections.from_arrays([box for box, _, _ in frame], [conf for _, conf, _ in frame], labels, names=NAMES)


def score(tracker: Tracker, scene: Scene) -> TrackingScores:
    """Score a tracker on the objects that can be seen in each frame."""
    rows = []
    for number, found in enumerate(found_in(scene)):
        tracks = tracker.update(found)
        seen = np.flatnonzero(scene.visible[number] >= HIDDEN)
        rows.append(((seen, scene.boxes[number, seen]), (tracks.ids, tracks.boxes.xyxy)))
    return score_tracks(rows)
