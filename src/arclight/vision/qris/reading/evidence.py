"""Weigh and place a detector's boxes by what is seen of QR codes in them.

Text and checkers have no finder patterns, and a code that is seen shows where a box should be. Its figures were chosen on the train
and val photos of `benchmarks/qr_photos.py`, which measures it.

``arclight predict --code-evidence`` wraps a detector of codes with it; a `Detect` comes in and goes out. `scanner` asks where the code of a box
is that it cannot read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.inference.fusion import Detect, overlaps, refuse_parts, suppressed
from arclight.vision.qris.reading.decode import Grey, contrast_stretched, enlarged_crop, symbol_quads, to_grey
from arclight.vision.qris.reading.finder_patterns import Floats, find_patterns, triples
from arclight.vision.qris.reading.grid import Box, template_correlation
from arclight.vision.qris.reading.grid_search import by_version
from arclight.vision.results.detections import Boxes, Detections

cv2 = require("cv2", extra="vision")

MAX_WEIGHED = 30
"""Boxes per image whose evidence is looked for, the most confident first; the others keep their confidence and place."""
NEUTRAL, SLOPE, MAX_SHIFT = 0.25, 14.0, 5.0
"""Strength that changes no confidence; log-odds per unit of strength above it; and the most by which these change, either way."""
MARGIN = 0.15
"""Share of a box added on every side: the detector may have cut off a finder pattern."""
SYMBOL_SIDES = (200, 400)
"""Longest side in pixels, at least and at most, of the view that a plain reader sees."""
MAX_ENLARGED = 4.0
PATTERN_SIDE, PATTERN_MODULE_PX, LARGEST = 96, 2.0, 10
"""Side in pixels of the square view in which finder patterns are looked for, pixels per module that are enough there, and the highest
version that is looked for."""
MIN_SIDE = 8.0
LEAST_IOU = 0.3
"""Least IoU of a box and the code that is seen in it."""
PLACING = 0.35
"""Strength from which the code that is seen gives the box its place."""


def with_code_evidence(
    detect: Detect,
    threshold: float = 0.0,
    *,
    classes: Collection[str] | None = None,
    iou_threshold: float = 0.5,
    agnostic: bool = False,
) -> Detect:
    """Return a detector that weighs and places each box by what is seen of a QR code in it.

    The log-odds of a box rise with the strength of its `code_evidence`, or fall, by at most `MAX_SHIFT`; a code that is seen well gives the box its own
    place. Then duplicates are suppressed (IoU ``iou_threshold``, across classes if ``agnostic``) and boxes below ``threshold`` are dropped. For boxes that may
    rise to it, ``detect`` has to find those from `threshold_before` on. ``classes``: those of QR codes, all by default; boxes of others keep their
    confidence and place. Raises ValueError for boxes with masks, keypoints or angles.
    """

    def weighed(images: Sequence[Image]) -> list[Detections]:
        answers = detect(images)
        refuse_parts(answers)
        results = []
        for image, found in zip(images, answers, strict=True):
            placed = suppressed(_weighed(found, to_grey(image), classes), iou_threshold, agnostic=agnostic)
            results.append(placed[placed.boxes.conf >= threshold])
        return results

    return weighed


def threshold_before(threshold: float) -> float:
    """Return the least confidence from which evidence can lift a box to ``threshold``."""
    return _confidence(_log_odds(threshold) - MAX_SHIFT)


def code_classes(names: Sequence[str]) -> list[str]:
    """Return the classes whose names say that they are of QR codes."""
    return [name for name in names if "qr" in name.lower()]


def _weighed(found: Detections, grey: Grey, classes: Collection[str] | None) -> Detections:
    height, width = grey.shape
    xyxy, conf = np.array(found.boxes.xyxy), np.array(found.boxes.conf)
    of_codes = [
        row for row, number in enumerate(found.boxes.cls) if classes is None or found.names[int(number)] in classes
    ]
    for row in of_codes[:MAX_WEIGHED]:
        x0, y0, x1, y1 = xyxy[row].clip(0, [width, height, width, height]).tolist()
        seen = code_evidence(grey, (x0, y0, x1, y1))
        shift = np.clip(SLOPE * (seen.strength - NEUTRAL), -MAX_SHIFT, MAX_SHIFT)
        conf[row] = _confidence(_log_odds(conf[row]) + shift)
        if seen.place is not None:
            xyxy[row] = np.clip(seen.place, 0, [width, height, width, height])
    return replace(found, boxes=Boxes(xyxy, conf, found.boxes.cls))[np.argsort(-conf, kind="stable")]


def _log_odds(confidence: float) -> float:
    inside = min(max(float(confidence), 1e-6), 1 - 1e-6)
    return math.log(inside / (1 - inside))


def _confidence(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


@dataclass(frozen=True)
class CodeEvidence:
    """Evidence of a QR code that about fills a box."""

    strength: float
    """1 if a plain reader decodes it; else the best correlation of the fixed modules with parallelograms of three likely finder patterns."""
    hull: Box | None
    """Upright box around the code (xyxy, pixels of the picture); None if its place is not known."""

    @property
    def place(self) -> Box | None:
        """The ``hull`` of a code that is seen well enough to tell its place better than a detector."""
        return self.hull if self.strength >= PLACING else None


NO_EVIDENCE = CodeEvidence(0.0, None)
UNREAD = CodeEvidence(0.4, None)
"""Evidence of a symbol that a plain reader finds and cannot decode: where it takes the corners to be is often wrong."""


def code_evidence(grey: Grey, box: Box) -> CodeEvidence:
    """Look for a QR code in ``box`` (xyxy, pixels) of the whole picture ``grey``."""
    x0, y0, x1, y1 = box
    if not (x1 - x0 >= MIN_SIDE and y1 - y0 >= MIN_SIDE):  # NaN, too
        return NO_EVIDENCE
    symbol = _symbol(grey, box)
    return symbol if symbol.strength == 1 else max(_finder_patterns(grey, box), symbol, key=lambda one: one.strength)


def _symbol(grey: Grey, box: Box) -> CodeEvidence:
    def size(width: int, height: int) -> tuple[int, int]:
        least, most = SYMBOL_SIDES
        factor = min(max(1.0, least / max(width, height)), most / max(width, height), MAX_ENLARGED)
        return max(1, round(width * factor)), max(1, round(height * factor))

    view = enlarged_crop(grey, box, MARGIN, size)
    best = NO_EVIDENCE
    for quad, is_read in symbol_quads(view.image):
        hull = _hulls(quad[None])
        if overlaps(hull, view.local(box))[0] >= LEAST_IOU:
            if is_read:
                return CodeEvidence(1.0, view.outer(hull[0]))
            best = UNREAD
    return best


def _finder_patterns(grey: Grey, box: Box) -> CodeEvidence:
    view = enlarged_crop(grey, box, MARGIN, lambda width, height: (PATTERN_SIDE, PATTERN_SIDE))
    picture = contrast_stretched(view.image)
    frames = triples(find_patterns(picture, LARGEST, PATTERN_MODULE_PX))
    soft = cv2.GaussianBlur(picture, (0, 0), PATTERN_SIDE / (1 + 2 * MARGIN) / 60)
    best = NO_EVIDENCE
    for version, shapes in by_version(frames, LARGEST):
        hulls = _hulls(shapes[:, :4])
        near = overlaps(hulls, view.local(box)) >= LEAST_IOU
        if near.any():
            fit = template_correlation(soft, shapes[near], version)
            if (strength := float(fit.max())) > best.strength:
                best = CodeEvidence(strength, view.outer(hulls[near][int(fit.argmax())]))
    return best


def _hulls(quads: Floats) -> Floats:
    """Return the upright boxes (N, 4) around quadrilaterals (N, 4, 2)."""
    return np.concatenate([quads.min(1), quads.max(1)], 1)
