"""Run sliced inference: detect on overlapping slices of a large image and merge the boxes.

``arclight predict --slice`` calls `sliced`; it takes and returns a `Detect` function, so it nests with `test_time` and `fusion`.
`BATCH` may be tuned to the machine; `_EDGE_SHARE` and `_INSIDE` change boxes, which tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arclight.vision.data.images import Image
from arclight.vision.inference.fusion import Detect, concatenated, refuse_parts, suppressed
from arclight.vision.results.detections import Detections

BATCH = 8
"""Slices predicted in one batch."""
_EDGE_SHARE = 0.01
"""A box counts as cut by a slice's inner edge if it ends within this share of the slice's side from it, or within 2 pixels."""
_INSIDE = 0.5
"""A cut box is the same object as a whole one if more than this share of its area lies inside; two cut boxes, if more than this share
of the smaller lies in the other, or if they face each other along at least this share of their common extent."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class _SliceBoxes:
    """Boxes found in slices, in the image's pixels, and which of their sides a seam has cut."""

    found: Detections
    cut: Bools
    """(k, 4) left, top, right, bottom."""


def sliced(
    detect: Detect,
    size: int,
    overlap: float = 0.2,
    *,
    whole: bool = True,
    iou_threshold: float = 0.5,
    agnostic: bool = False,
) -> Detect:
    """Return a detector that predicts on overlapping slices of ``size`` pixels.

    Slices overlap by the share ``overlap``; with ``whole`` the whole image is predicted on, too, for large objects.
    An image that is no larger than a slice is predicted once. Boxes that overlap by more than ``iou_threshold`` suppress each other (NMS),
    boxes that a seam has cut give way to a whole one of their object, and cut parts that face each other across a seam are joined.
    ``agnostic``: boxes suppress those of other classes, too. Idea: Akyon et al. 2022, "Slicing aided hyper inference".
    """
    if size < 1:
        raise ValueError(f"slices have a side of 1 pixel or more, got {size}")
    if not 0 <= overlap < 1:
        raise ValueError(f"slices overlap by a share in [0, 1), got {overlap}")

    def one(image: Image) -> Detections:
        height, width = image.shape[:2]
        if height <= size and width <= size:
            return detect([image])[0]
        parts = [
            _slice_boxes(detect, image, corners, size) for corners in _chunks(slices(height, width, size, overlap))
        ]
        if whole:
            (found,) = detect([image])
            parts.append(_SliceBoxes(found, np.zeros((len(found), 4), np.bool_)))
        return _merged(parts, image, iou_threshold, agnostic)

    return lambda images: [one(image) for image in images]


def slices(height: int, width: int, size: int, overlap: float) -> list[tuple[int, int]]:
    """List the left upper corners (x, y) of the slices that cover an image.

    The last ones overlap by more, so as to end at the edge.
    """
    step = max(round(size * (1 - overlap)), 1)

    def starts(length: int) -> list[int]:
        last = max(length - size, 0)
        return sorted({*range(0, last, step), last})

    return [(x, y) for y in starts(height) for x in starts(width)]


def _chunks(corners: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    for start in range(0, len(corners), BATCH):
        yield corners[start : start + BATCH]


def _slice_boxes(detect: Detect, image: Image, corners: list[tuple[int, int]], size: int) -> _SliceBoxes:
    height, width = image.shape[:2]
    answers = detect([np.ascontiguousarray(image[y : y + size, x : x + size]) for x, y in corners])
    margin = max(2.0, _EDGE_SHARE * size)
    boxes, cuts = [], []
    refuse_parts(answers)
    for found, (x, y) in zip(answers, corners, strict=True):
        right, bottom = min(x + size, width), min(y + size, height)
        xyxy = found.boxes.xyxy + np.tile(np.array([x, y], np.float32), 2)
        moved = Detections.from_arrays(xyxy, found.boxes.conf, found.boxes.cls, names=found.names, image=image)
        near = np.abs(moved.boxes.xyxy - [x, y, right, bottom]) <= margin
        cuts.append(near & np.array([x > 0, y > 0, right < width, bottom < height]))
        boxes.append(moved)
    return _SliceBoxes(concatenated(boxes), _in_order(boxes, cuts))


def _in_order(boxes: Sequence[Detections], cuts: Sequence[Bools]) -> Bools:
    """Put ``cuts`` in the order that :func:`concatenated` gives the boxes."""
    order = np.argsort(-np.concatenate([found.boxes.conf for found in boxes]), kind="stable")
    return np.concatenate(cuts)[order]


def _merged(parts: Sequence[_SliceBoxes], image: Image, iou_threshold: float, agnostic: bool) -> Detections:
    found = concatenated([part.found for part in parts])
    cut = _in_order([part.found for part in parts], [part.cut for part in parts])
    partial = cut.any(axis=1)
    entire = suppressed(found[~partial], iou_threshold, agnostic=agnostic)
    pieces, cut = found[partial], cut[partial]
    shared = _share_inside(pieces, entire)
    alone = ~(shared > _INSIDE).any(axis=1)
    joined = _joined(pieces[alone], cut[alone])
    merged = suppressed(concatenated([entire, joined]), iou_threshold, agnostic=agnostic)
    return Detections(merged.boxes, merged.names, image, found.path)


def _share_inside(pieces: Detections, entire: Detections) -> NDArray[np.float64]:
    """Compute the share (n, m) of each piece that lies in each whole box; 0 for other classes."""
    a, b = pieces.boxes.xyxy[:, None].astype(np.float64), entire.boxes.xyxy[None].astype(np.float64)
    common = (np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])).clip(0).prod(axis=2)
    area = (a[..., 2:] - a[..., :2]).prod(axis=2)
    share = np.divide(common, area, out=np.ones_like(common), where=area > 0)
    return np.where(pieces.boxes.cls[:, None] == entire.boxes.cls, share, 0.0)


def _joined(pieces: Detections, cut: Bools) -> Detections:
    """Join the pieces of each object to their bounding box, with their best confidence."""
    boxes, cut = pieces.boxes.xyxy.astype(np.float64).copy(), cut.copy()
    conf, cls = pieces.boxes.conf.copy(), pieces.boxes.cls
    left = list(range(len(boxes)))
    changed = True
    while changed:
        changed = False
        for first in list(left):
            while first in left and (partner := _partner(boxes, cut, cls, first, left)) is not None:
                outer = np.concatenate((boxes[partner, :2] < boxes[first, :2], boxes[partner, 2:] > boxes[first, 2:]))
                cut[first] = np.where(outer, cut[partner], cut[first])  # sides within the union are cut no more
                boxes[first] = np.where(outer, boxes[partner], boxes[first])
                conf[first] = max(conf[first], conf[partner])
                left.remove(partner)
                changed = True
    kept = np.array(left, np.intp)
    return Detections.from_arrays(boxes[kept], conf[kept], cls[kept], names=pieces.names, image=pieces.image)


def _partner(
    boxes: NDArray[np.float64], cut: Bools, cls: NDArray[np.float32], first: int, left: list[int]
) -> int | None:
    """Return the first piece of the class that belongs to piece ``first``; None if none does."""
    of_class = (other for other in left if other != first and cls[other] == cls[first])
    return next((other for other in of_class if _belong(boxes, cut, first, other)), None)


def _belong(boxes: NDArray[np.float64], cut: Bools, first: int, other: int) -> bool:
    """Return True if two boxes are pieces of one object.

    They are if both are cut where they meet and agree along that seam, or if one lies mostly in the other.
    """
    a, b = boxes[first], boxes[other]
    common_area = (np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])).clip(0).prod()
    if common_area > _INSIDE * min((a[2:] - a[:2]).prod(), (b[2:] - b[:2]).prod()):
        return True
    for axis in (0, 1):
        across = min(a[axis + 2], b[axis + 2]) - max(a[axis], b[axis])
        low, high = (first, other) if a[axis] <= b[axis] else (other, first)
        if across < 0 or not (cut[low, axis + 2] and cut[high, axis]):
            continue
        along = 1 - axis
        common = min(a[along + 2], b[along + 2]) - max(a[along], b[along])
        extent = max(a[along + 2], b[along + 2]) - min(a[along], b[along])
        if extent > 0 and common / extent >= _INSIDE:
            return True
    return False
