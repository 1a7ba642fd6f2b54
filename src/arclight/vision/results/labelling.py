"""Select images to label next (active learning), and label images by a detector.

``arclight predict`` uses `MostUncertain` and `PseudoLabels` as writers: predictions come in one by one, a ranking or label files go out.
`read_thresholds` reads the ``validate.json`` that ``arclight validate`` writes; the two must change together.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from arclight.vision.results.detections import Detections
from arclight.vision.results.writers import Labels, PlainWriter, Prediction

DOUBT_FLOOR = 0.05
"""Least confidence of boxes that count in `uncertainty`; less confident ones are noise."""


def uncertainty(found: Detections) -> float:
    """Sum the binary entropy, in bits, of the confidences of at least 0.05.

    A box of confidence 0.5 counts 1, one of 0.99 or 0.05 little; an image with many doubtful boxes comes before one with few.
    Entropy sampling (Settles 2009, "Active Learning Literature Survey", section 3.1), summed over the boxes of an image
    (Brust et al. 2019, "Active Learning for Deep Object Detection", section 4). Objects that leave no doubtful box are not seen.
    """
    p = found.boxes.conf.astype(np.float64)
    p = p[p >= DOUBT_FLOOR].clip(1e-9, 1 - 1e-9)
    return float((p * -np.log2(p) - (1 - p) * np.log2(1 - p)).sum())


class MostUncertain(PlainWriter):
    """Keep the ``count`` images of the highest `uncertainty`; ``ranking`` lists them.

    The highest comes first, equal ones are in their order.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._kept: list[tuple[float, int, str]] = []
        self._seen = 0

    def write(self, prediction: Prediction) -> None:
        self._seen += 1
        item = (uncertainty(prediction.doubtful), -self._seen, prediction.name)
        if len(self._kept) < self.count:
            heapq.heappush(self._kept, item)
        else:
            heapq.heappushpop(self._kept, item)

    @property
    def ranking(self) -> list[tuple[float, str]]:
        return [(score, name) for score, _, name in sorted(self._kept, reverse=True)]


class PseudoLabels(Labels):
    """Writer of pseudo-labels: YOLO label files of a detector's own confident boxes.

    These are at or above the confidence threshold of their class. An image in which nothing is sure gets no file: an empty one would
    call it background. Boxes of a class without a threshold are left out.
    """

    def __init__(self, folder: Path, thresholds: Mapping[str, float]) -> None:
        super().__init__(folder)
        self.thresholds = thresholds

    def write(self, prediction: Prediction) -> None:
        found = prediction.doubtful
        sure = [
            confidence >= self.thresholds.get(label, math.inf)
            for label, confidence in zip(found.labels, found.boxes.conf.tolist(), strict=True)
        ]
        if any(sure):
            super().write(dataclasses.replace(prediction, found=found[np.array(sure)]))


def read_thresholds(path: Path) -> dict[str, float]:
    """Read the best threshold of each class from a validate.json of ``arclight validate``.

    Classes that it found no threshold for are left out. Raises ValueError for a file that is none such.
    """
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))["classes"]
        found = {str(name): float(one["confidence"]) for name, one in classes.items() if "confidence" in one}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no thresholds: give the validate.json of arclight validate") from error
    if wrong := [name for name, confidence in found.items() if not 0 <= confidence <= 1]:
        raise ValueError(f"{path}: the confidence of class {wrong[0]!r} is {found[wrong[0]]}: it must be from 0 to 1")
    if not found:
        raise ValueError(f"{path} has no threshold of any class: the detector found nothing when it was written")
    return found
