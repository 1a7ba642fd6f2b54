"""Fuse the boxes of several passes over one image: by suppression, or weighted box fusion.

``arclight predict`` fuses several detectors by `ensemble`; `slicing` and `test_time` use `concatenated` and `suppressed`,
``qris.reading.evidence`` `suppressed` and `overlaps`. A `Detect` takes RGB photos and returns `Detections`; boxes are pixels of the whole
photo. Boxes alone are fused: masks, keypoints and angles are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from arclight.vision.boxes import greedy_nms
from arclight.vision.data.images import Image
from arclight.vision.results.detections import Detections

Floats = NDArray[np.float64]
AnyFloats = NDArray[np.floating[Any]]

Detect: TypeAlias = "Callable[[Sequence[Image]], list[Detections]]"
"""A detector as a function: images (height, width, 3) RGB uint8 of any sizes to the objects in each."""


def refuse_parts(parts: Sequence[Detections]) -> None:
    """Raise ValueError for detections with masks, keypoints or angles, which fusion would lose."""
    if any(part.masks is not None for part in parts):
        raise ValueError("boxes of several passes are fused without masks: use a detector, not a segmenter")
    if any(part.keypoints is not None for part in parts):
        raise ValueError("boxes of several passes are fused without keypoints: use a detector, not a pose estimator")
    if any(part.obb is not None for part in parts):
        raise ValueError("boxes of several passes are fused without angles: use a detector of upright boxes")


def concatenated(parts: Sequence[Detections]) -> Detections:
    """Concatenate the boxes of several passes over one image, most confident first.

    Raises ValueError if their classes differ, for masks, keypoints and angles, and if there are no parts.
    """
    if not parts:
        raise ValueError("no detections to fuse: give one or more")
    first = parts[0]
    if other := next((part.names for part in parts if part.names != first.names), None):
        raise ValueError(
            f"these find other classes: {', '.join(first.names)} and {', '.join(other)}; their boxes cannot be fused"
        )
    refuse_parts(parts)
    arrays = [np.concatenate([getattr(part.boxes, name) for part in parts]) for name in ("xyxy", "conf", "cls")]
    return Detections.from_arrays(*arrays, names=first.names, image=first.image, path=first.path)


def suppressed(found: Detections, iou_threshold: float, *, agnostic: bool = False) -> Detections:
    """Suppress boxes that overlap a more confident one by more than ``iou_threshold``.

    Only boxes of one class suppress each other, unless ``agnostic``.
    """
    boxes, classes = torch.tensor(found.boxes.xyxy), torch.tensor(found.boxes.cls)
    kept = greedy_nms(boxes, torch.zeros_like(classes) if agnostic else classes, iou_threshold)
    return found if len(kept) == len(found) else found[kept.numpy()]


def weighted_box_fusion(
    parts: Sequence[Detections], weights: Sequence[float] | None = None, iou_threshold: float = 0.55
) -> Detections:
    """Average the boxes of several detectors (Solovyev et al. 2021, "Weighted boxes fusion").

    Boxes of a class that overlap by more than ``iou_threshold`` are one object: its sides are their mean, weighted by confidence,
    and its confidence their mean, times the number of boxes over that of detectors, at most 1. ``weights``: factors of the
    detectors' confidences, relative to the largest, and what each counts in their number; 1 if not given.
    """
    shares = np.ones(len(parts)) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (len(parts),) or not (np.isfinite(shares).all() and (shares > 0).all()):
        raise ValueError(f"a positive weight for each of {len(parts)} detectors is needed, got {shares.tolist()}")
    found = concatenated([
        replace(part, boxes=replace(part.boxes, conf=part.boxes.conf * share / shares.max())) for part, share in zip(parts, shares)
    ])  # fmt: skip
    total = shares.sum() / shares.max()
    xyxy, conf, cls = (np.asarray(getattr(found.boxes, name), np.float64) for name in ("xyxy", "conf", "cls"))
    sums, counts, confs, classes = np.zeros((0, 5)), np.zeros(0), np.zeros(0), np.zeros(0)
    for box, score, label in zip(xyxy, conf, cls):  # most confident first
        overlap = np.where(classes == label, overlaps(sums[:, :4] / np.maximum(sums[:, 4:], 1e-12), box), 0.0)
        if (best := int(overlap.argmax()) if len(overlap) else -1) < 0 or overlap[best] <= iou_threshold:
            sums, counts = np.concatenate((sums, np.zeros((1, 5)))), np.append(counts, 0)
            confs, classes = np.append(confs, 0), np.append(classes, label)
            best = len(counts) - 1
        sums[best] += np.append(box, 1.0) * score
        counts[best] += 1
        confs[best] += score
    fused = sums[:, :4] / np.maximum(sums[:, 4:], 1e-12)
    scores = confs / np.maximum(counts, 1) * np.minimum(counts, total) / total
    return Detections.from_arrays(fused, scores, classes, names=found.names, image=found.image, path=found.path)


def overlaps(boxes: AnyFloats, box: AnyFloats) -> AnyFloats:
    """Compute the IoU (n,) of boxes (n, 4) with one box (4,)."""
    sides = np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])
    common: AnyFloats = sides.clip(0).prod(axis=1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod() - common
    shares: AnyFloats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return shares


def ensemble(
    detectors: Sequence[Detect],
    weights: Sequence[float] | None = None,
    iou_threshold: float = 0.55,
    *,
    agnostic: bool = False,
) -> Detect:
    """Return a detector that fuses the boxes of several; see :func:`weighted_box_fusion`.

    ``agnostic``: fused boxes suppress those of other classes, too.
    """
    if not detectors:
        raise ValueError("an ensemble needs one detector or more")

    def detect(images: Sequence[Image]) -> list[Detections]:
        answers = [detector(images) for detector in detectors]
        fused = [weighted_box_fusion(parts, weights, iou_threshold) for parts in zip(*answers, strict=True)]
        return [suppressed(found, iou_threshold, agnostic=True) for found in fused] if agnostic else fused

    return detect
