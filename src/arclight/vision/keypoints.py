"""Compare keypoints of objects: object keypoint similarity (OKS) as COCO defines it.

Shapes: k found and m true objects with K keypoints each; x, y in any one unit of length.

``models.loss``, ``models.heads``, ``results.pose_metrics`` and ``tasks.detection`` call these; ``results.draw`` draws the skeleton. OKS must
stay COCO's, and the order of `BOX_CORNERS` is that of the corners in trained heads and labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COCO_SIGMAS = (
    0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072, 0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089, 0.089,
)  # fmt: skip
"""How far annotators disagree about each keypoint of a person, as a share of the root of the person's area."""
COCO_SKELETON = (
    (15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10), (1, 2), (0, 1),
    (0, 2), (1, 3), (2, 4), (3, 5), (4, 6),
)  # fmt: skip
"""Which keypoints of a person are joined by a line."""
AREA_SHARE = 0.53
"""Area of an object as a share of its box's area, as labels have no outline; the mean of persons in COCO."""
BOX_CORNERS = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
"""Corners of a box, clockwise from the top left, relative to its centre in units of its width and height."""
SEEN = 0.5
"""Confidence from which a keypoint counts as seen: it is drawn, and labels have it."""


def sigmas_of(count: int, given: Sequence[float] = (), cyclic: bool = False) -> tuple[float, ...]:
    """Return the OKS deviation of each of ``count`` keypoints.

    Those given, COCO's for 17 that are not ``cyclic``, else 1 / count each. Raises ValueError if those given are not
    as many.
    """
    if not given:
        return COCO_SIGMAS if count == len(COCO_SIGMAS) and not cyclic else (1 / count,) * count
    if len(given) != count:
        raise ValueError(f"keypoint_sigmas has {len(given)} numbers, there are {count} keypoints: give one for each")
    return tuple(given)


def numberings(count: int, cyclic: bool) -> NDArray[np.int64]:
    """Return the numberings (S, count) of an object's keypoints.

    They are 0 to count - 1 and, if ``cyclic``, its rotations.
    """
    return (np.arange(count)[: count if cyclic else 1, None] + np.arange(count)) % count


def keypoint_similarity(
    found: Floats, true: Floats, boxes: Floats, areas: Floats, sigmas: Sequence[float], cyclic: bool = False
) -> Floats:
    """Compute the OKS (k, m) of found keypoints (k, K, 2) with true ones (m, K, 2).

    It is in [0, 1]; true keypoints that are NaN are left out.
    boxes: (m, 4) xyxy, areas: (m,) of the true objects. Of an object without any labelled keypoint, the distance of those found
    from a box three times as wide and high is taken (COCO). ``cyclic``: any found keypoint may be the first, the
    others follow in turn; the highest similarity is taken.
    """
    if cyclic:
        ways = numberings(found.shape[1], cyclic)
        each = [keypoint_similarity(found[:, way], true, boxes, areas, sigmas) for way in ways]
        best: Floats = np.max(each, axis=0)
        return best
    result = np.zeros((len(found), len(true)))
    spread = 2 * np.square(2 * np.asarray(sigmas, np.float64))
    for j, (points, box, area) in enumerate(zip(true, boxes, areas, strict=True)):
        labelled = np.isfinite(points).all(-1)
        if labelled.any():
            squared = np.square(found[:, labelled] - points[labelled]).sum(-1)
        else:
            low, high = 2 * box[:2] - box[2:], 2 * box[2:] - box[:2]
            apart = np.maximum(low - found, 0) + np.maximum(found - high, 0)
            squared, labelled = np.square(apart).sum(-1), np.ones_like(labelled)
        result[:, j] = np.exp(-squared / spread[labelled] / (area + np.spacing(1))).mean(-1)
    return result
