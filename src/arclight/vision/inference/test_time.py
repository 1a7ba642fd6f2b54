"""Predict on smaller, mirrored or resized copies of an image too (test-time augmentation).

``arclight predict`` uses `augmented` (``--augment``) and `multi_scale` (``--sizes``). Both return a `Detect`, which takes photos and
returns `Detections` as the plain detector does. `augmented` wraps any `Detect`, programs too; `multi_scale` needs a `Detector`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.data.letterbox import GREY
from arclight.vision.inference.fusion import Detect, concatenated, suppressed
from arclight.vision.results.detections import Boxes, Detections

if TYPE_CHECKING:
    from arclight.vision.tasks.detection import Detector
    from arclight.vision.tasks.processing import DetectionProcessing

VARIANTS = ((1.0, False), (0.83, True), (0.67, False))
"""Scale of each copy, and whether it is mirrored left to right: YOLOv5's."""


def augmented(
    detect: Detect,
    *,
    variants: Sequence[tuple[float, bool]] = VARIANTS,
    iou_threshold: float = 0.5,
    agnostic: bool = False,
) -> Detect:
    """Return a detector that predicts on ``variants`` of each image and suppresses duplicates.

    ``agnostic``: boxes suppress those of other classes, too. A detector scales what it gets to its own input, so an image is made
    smaller in it by a grey margin. Raises ValueError for scales outside (0, 1], and for no variant.
    """
    for scale, _ in variants:
        if not 0 < scale <= 1:
            raise ValueError(
                f"the scale of a variant lies in (0, 1], got {scale}: larger ones would cut the image; use slices"
            )
    if not variants:
        raise ValueError("no variant to run: give one or more")

    def augmented_detect(images: Sequence[Image]) -> list[Detections]:
        looks = [_varied(image, scale, mirrored) for image in images for scale, mirrored in variants]
        answers = iter(detect([look for look, _ in looks]))
        placements = iter(placement for _, placement in looks)
        results = []
        for image in images:
            parts = [_back(next(answers), image, next(placements), mirrored) for _, mirrored in variants]
            results.append(suppressed(concatenated(parts), iou_threshold, agnostic=agnostic))
        return results

    return augmented_detect


def multi_scale(
    detector: Detector,
    sizes: Sequence[int],
    processing: DetectionProcessing | None = None,
    *,
    iou_threshold: float = 0.5,
    agnostic: bool = False,
) -> Detect:
    """Return a detector that predicts at several input sizes and suppresses duplicates.

    sizes: sides of the square input in pixels, one pass each; large ones help with small objects, small ones with very large objects.
    processing: replaces the detector's own, except for the size; its ``max_det`` is of all passes together. agnostic:
    boxes suppress those of other classes, too; so they do if processing says so. Raises ValueError for sizes that are not positive
    multiples of the detector's largest stride, and for none.
    """
    coarsest = int(detector.model.stride[-1])
    if not sizes or (wrong := [size for size in sizes if size <= 0 or size % coarsest]):
        raise ValueError(
            f"input sizes must be positive multiples of {coarsest} for this detector, got {wrong[0] if sizes else 'none'}"
        )
    used = detector.processing if processing is None else processing
    passes = [partial(detector.predict, processing=replace(used, image_size=size)) for size in dict.fromkeys(sizes)]
    if len(passes) == 1:
        return passes[0]

    def detect(images: Sequence[Image]) -> list[Detections]:
        answers = zip(*(look(images) for look in passes), strict=True)
        return [
            suppressed(concatenated(parts), iou_threshold, agnostic=agnostic or used.agnostic)[: used.max_det]
            for parts in answers
        ]

    return detect


def _varied(image: Image, scale: float, mirrored: bool) -> tuple[Image, tuple[int, int]]:
    """Return the changed image, and where its left upper corner lies in it (x, y)."""
    shown = image[:, ::-1] if mirrored else image
    if scale == 1.0:
        return np.ascontiguousarray(shown), (0, 0)
    height, width = image.shape[:2]
    canvas = np.full((round(height / scale), round(width / scale), 3), GREY, np.uint8)
    top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
    canvas[top : top + height, left : left + width] = shown
    return canvas, (left, top)


def _back(found: Detections, image: Image, placement: tuple[int, int], mirrored: bool) -> Detections:
    """Map boxes of a test-time variant back to the image, without those in the margin alone."""
    height, width = image.shape[:2]
    xyxy = (found.boxes.xyxy - np.tile(placement, 2)).clip(0, [width, height, width, height])
    if mirrored:
        xyxy = np.stack((width - xyxy[:, 2], xyxy[:, 1], width - xyxy[:, 0], xyxy[:, 3]), axis=1)
    kept = (xyxy[:, 2:] > xyxy[:, :2]).all(axis=1)
    boxes = Boxes(xyxy[kept], found.boxes.conf[kept], found.boxes.cls[kept])
    return replace(found, boxes=boxes, image=image, ids=None)
