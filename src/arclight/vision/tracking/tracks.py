"""Follow objects through videos: make a tracker by its name, and keep one for each video.

``arclight predict`` keeps `Trackers` over its sources; `Detector.track` runs `track` over one. `byte_track` and `oc_sort` are the
trackers; another one needs the methods of `Tracker`, a name in `TRACKERS` and `make_tracker`, and that of ``arclight predict --track``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from arclight.vision.inference.fusion import Detect
from arclight.vision.inputs.image_source import Frame, ImageSource
from arclight.vision.results.detections import Detections
from arclight.vision.tracking.byte_track import ByteTrack
from arclight.vision.tracking.oc_sort import OCSort

CONFIDENT = 0.25
"""Confidence from which a box may begin a track, by default."""
LOWEST = 0.1
"""Confidence from which ByteTrack uses boxes."""

TRACKERS = ("bytetrack", "ocsort")


def lowest_confidence(name: str, confidence: float) -> float:
    """Return the lowest confidence of boxes that a tracker uses.

    ``confidence``: from which a box may begin a track.
    """
    return min(LOWEST, confidence) if name == "bytetrack" else confidence


class Tracker(Protocol):
    """Follows the objects of one video."""

    def update(self, found: Detections, step: int = 1) -> Detections:
        """Return the boxes of this frame that belong to tracks, with their ``ids``.

        ``step``: frames since the one before.
        """


def make_tracker(name: str, confidence: float = CONFIDENT) -> Tracker:
    """Return a new tracker by name.

    ``confidence``: from which a box may begin a track. Raises ValueError for an unknown name.
    """
    if name == "bytetrack":
        return ByteTrack(high=confidence, low=lowest_confidence(name, confidence))
    if name == "ocsort":
        return OCSort(confidence=confidence)
    raise ValueError(f"{name!r} is not a tracker; choose one of {', '.join(TRACKERS)}")


class Trackers:
    """A tracker for each video, stream and folder of images, as frames of them come in turn."""

    def __init__(self, make: Callable[[], Tracker]) -> None:
        self._make = make
        self._trackers: dict[str, tuple[Tracker, int]] = {}

    def update(self, frame: Frame, found: Detections) -> Detections:
        """Return the boxes of ``frame`` that belong to tracks, with ids of their own per source.

        Images of one folder are taken for the frames of a video. A source that starts again gets a new tracker.
        """
        key = frame.path if frame.index is not None else f"{Path(frame.path).parent}/"
        tracker, last = self._trackers.get(key, (None, -1))
        index = last + 1 if frame.index is None else frame.index
        if tracker is None or index <= last:
            tracker, last = self._make(), index - 1
        self._trackers[key] = tracker, index
        return tracker.update(finite(found), index - last)


def finite(found: Detections) -> Detections:
    """Leave out boxes that no filter can follow: NaN or infinite, or without area."""
    sides = found.boxes.xyxy
    fit = np.isfinite(sides).all(axis=1) & (sides[:, 2:] > sides[:, :2]).all(axis=1) & np.isfinite(found.boxes.conf)
    return found if fit.all() else found[fit]


def track(detect: Detect, source: ImageSource, make: Callable[[], Tracker], batch: int = 1) -> Iterator[Detections]:
    """Yield the tracked objects of each frame of a source, with ``ids`` and ``path``.

    ``path`` names the frame.
    """
    trackers = Trackers(make)
    with closing(source.batches(batch)) as batches:
        for frames in batches:
            for frame, found in zip(frames, detect([frame.image for frame in frames]), strict=True):
                yield replace(trackers.update(frame, found), path=frame.name)
