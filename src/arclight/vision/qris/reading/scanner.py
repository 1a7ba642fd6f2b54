"""Find, decode and parse every QR code in a photo.

`scan` is public (``arclight.vision.qris``); ``arclight scan``, the server and ``verification.verifier`` call it, `video` takes parts. In: an
RGB photo and a detector; out: a `Code` for each code read or detected. Work on a photo is bounded, as photos are untrusted. Keys of
`Code.to_json` are in the server's answers: they stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.payload.codec import Kind, Payload, read_printed
from arclight.vision.qris.payload.rules import QRIS_GUID
from arclight.vision.qris.payload.tlv import QrisError
from arclight.vision.qris.reading.decode import (
    GRID_VIEWS,
    MAX_UPSCALED_SIDE,
    DecodedCode,
    Grey,
    enlarged_crop,
    is_large_enough,
    read_grid,
    read_near,
    read_other_symbols,
    read_view,
    read_zxing,
    sharpened,
    to_grey,
    views_of,
    widened,
)
from arclight.vision.qris.reading.evidence import code_evidence
from arclight.vision.qris.reading.finder_patterns import Floats
from arclight.vision.qris.reading.grid import Box, clockwise
from arclight.vision.rotated import refusal_of_quadrilateral

if TYPE_CHECKING:
    from arclight.vision.results.detections import Detections

NOT_READ = "a code was detected here but could not be read"
NOT_TRIED = "a code was detected here but not every reader was tried: the photo's other codes used up the time or its share of work"
BLANKS_AROUND = "blanks stand around the payload"
HIDDEN = "holds a payment payload behind other characters, which some readers pass over"
MAX_GRID_BOXES, MAX_GRID_TRIES, MAX_GRID_READ = 4, 6, 12
"""Boxes per photo on which a module grid may fail, the surest first, failed tries, and boxes in all: one costs a hundred plain readings."""
MAX_CORNERED = 4
"""Boxes per photo that are read by their corners, the surest first: one costs up to half of a module grid that is searched for."""
MAX_VIEW_PIXELS = 20_000_000
"""Pixels of enlarged views per photo, all boxes together: real photos need 14 million at most, ones of huge boxes would never end."""
WIDER, CUT_OFF = 0.08, 0.03
"""Share of a box added on every side in the second round: a box that cuts off a finder pattern hides the grid; and the share of it that
a box too small for the first round may lack, at most: with more, none of 60 was read."""
MIN_WIDENED_SCORE, MAX_WIDENED_SCORE = 0.2, 0.7
"""Correlations of a box's best grid from which, and below which, the wider box is searched: with less there is no code, and more is as
right as a grid gets. Boxes that were read by the wider one had 0.24 to 0.64."""
MAX_PLACED_TRIES = 2
"""Boxes per photo on which a further grid may fail, where the code that is seen has given the box another place."""
MIN_HINTING_SCORE = 0.3
"""Least correlation of a box's best grid for the search of the wider box to be thorough; boxes that were read so had 0.34 and more."""


DetectFn = Callable[[Image], "Detections"]
"""RGB image -> its Detections, of which ``boxes.xyxy`` (pixels) and ``boxes.conf`` are used.

``keypoints`` (k, 4, 2) or (k, 4, 3), as `CornerDetector` gives them, are taken for each code's corners, in turn from any.
"""
StopFn = Callable[[], bool]
"""Asked between readers: True leaves the remaining ones untried."""


def never() -> bool:
    """Return False: no deadline stops the readers."""
    return False


@dataclass(frozen=True)
class Code:
    """One code in a photo; ``text`` is None if it was detected but not read."""

    corners_px: tuple[tuple[float, float], ...]
    """Corners of the code (x, y), clockwise from its own top left; those of the box if it was not read."""
    box_xyxy_px: Box
    confidence: float
    """Confidence of the detector, in [0, 1]; 1 for a code that was read without being detected."""
    text: str | None = None
    """What it says; bytes that are no text appear as ISO 8859-1 characters."""
    kind: Kind = "other"
    payload: Payload | None = None
    problems: tuple[str, ...] = field(default=())
    symbology: str | None = None
    """Symbology of a code other than QR, such as EAN13: see `other_symbols`."""

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and text.

        ``symbology`` is set for codes other than QR only.
        """
        named = {} if self.symbology is None else {"symbology": self.symbology}
        return named | {
            "corners_px": [list(point) for point in self.corners_px],
            "box_xyxy_px": list(self.box_xyxy_px),
            "confidence": self.confidence,
            "text": self.text,
            "kind": self.kind,
            "payload": None if self.payload is None else self.payload.to_json(),
            "problems": list(self.problems),
        }


@dataclass
class DetectorBox:
    """A box that a detector found, clipped to the picture."""

    xyxy: Box
    confidence: float
    left_untried: bool = False
    """Whether readers were left that might have read a code here, had the photo's share of work sufficed."""
    grid_score: float | None = None
    """Best correlation of a module grid here, None before one was looked for."""
    corners: Floats | None = None
    """Approximate corners of the code (4, 2), clockwise from any, if the detector finds them."""


def scan(image: Image, detector: DetectFn | None = None, *, stop: StopFn = never) -> list[Code]:
    """Scan ``image`` (H, W, 3) RGB or (H, W) grey, uint8, for codes: read ones first.

    The whole picture is read first, so that nothing a plain reader finds is lost; then each of the detector's
    boxes that nothing was read in is enlarged, straightened (by its corners, where the detector gives them) and read
    again; at last it is placed where a code is seen. Without a detector only the whole picture is read. The work on one
    photo is bounded, whatever it shows, and ends early once ``stop()`` is true, which is asked between readers: boxes on
    which a reader was left untried say so.
    Raises ValueError for an array that is no such image.
    """
    grey = as_grey(image)
    if min(grey.shape) < 8:
        return []
    found = read_zxing(grey)
    boxes = [] if detector is None else detector_boxes(detector(image), grey.shape)
    found = _read_cornered(grey, boxes, read_views(grey, boxes, found, stop), stop)
    if not stop() and (not boxes or not all(_is_read(box, found) for box in boxes)):
        found = _merged(found, _read_enlarged(grey))
    found = _read_placed(grey, boxes, _read_grids(grey, boxes, found, stop), stop)
    return _codes(found, boxes)


def other_symbols(image: Image) -> list[Code]:
    """Read the symbols of ``image`` that are no QR codes: bar codes, Data Matrix and others.

    ``image``: (H, W, 3) RGB or (H, W) grey, uint8. They are no payment codes, whatever they say, and their ``symbology`` is
    named. The whole picture is read once, plainly. Raises ValueError for an array that is no such image.
    """
    grey = as_grey(image)
    if min(grey.shape) < 8:
        return []
    return [_other(name, read) for name, read in read_other_symbols(grey)]


def _other(symbology: str, read: DecodedCode) -> Code:
    plain = code_of(read, None)
    return replace(plain, kind="other", payload=None, problems=(), symbology=symbology)


def read_views(
    grey: Grey, boxes: list[DetectorBox], found: list[DecodedCode], stop: StopFn = never
) -> list[DecodedCode]:
    """Read enlarged views of unread boxes, the most useful view of each before the next.

    It stops when the limit of pixels is reached.
    """
    pixels = 0
    left = [(box, views_of(grey, box.xyxy)) for box in boxes]
    while left:
        remaining = []
        for box, views in left:
            if _is_read(box, found):
                continue
            if pixels >= MAX_VIEW_PIXELS or stop():
                box.left_untried = True
                continue
            if (view := next(views, None)) is None:
                continue
            pixels += view.image.size
            found = _merged(found, read_view(view))
            remaining.append((box, views))
        left = remaining
    return found


def _read_cornered(grey: Grey, boxes: list[DetectorBox], found: list[DecodedCode], stop: StopFn) -> list[DecodedCode]:
    """Read unread boxes of known corners, rectified by them.

    What remains unread is for `_read_grids`.
    """
    left = [box for box in boxes if box.corners is not None and not _is_read(box, found)]
    for box in left[:MAX_CORNERED]:
        if stop():
            break
        if box.corners is not None and not _is_read(box, found):
            found = _merged(found, read_near(grey, box.corners))
    return found


def _read_grids(grey: Grey, boxes: list[DetectorBox], found: list[DecodedCode], stop: StopFn) -> list[DecodedCode]:
    """Read module grids in unread boxes, the surest first; return all codes.

    A box that is read costs no turn of the others. Those that were not are widened if that may show more.
    """
    tries, tried, failed = MAX_GRID_TRIES, list[DetectorBox](), 0
    for box in boxes:
        if _is_read(box, found) or not is_large_enough(widened(box.xyxy, CUT_OFF)):
            continue
        if not tries or failed == MAX_GRID_BOXES or len(tried) == MAX_GRID_READ or stop():
            box.left_untried = True
            continue
        tried.append(box)
        read = read_grid(grey, box.xyxy, min(len(GRID_VIEWS), tries), thorough=True)
        found, box.grid_score = _merged(found, read.codes), read.score
        if not read.codes:
            tries, failed = tries - read.views, failed + 1
    for box in tried:
        known = box.grid_score
        if _is_read(box, found) or not (known is None or MIN_WIDENED_SCORE <= known < MAX_WIDENED_SCORE):
            continue
        if stop():
            box.left_untried = True
        elif tries:
            thorough = known is None or known >= MIN_HINTING_SCORE
            read = read_grid(grey, widened(box.xyxy, WIDER), 1, thorough=thorough)
            found, tries = _merged(found, read.codes), tries - read.views
    return found


def _read_placed(grey: Grey, boxes: list[DetectorBox], found: list[DecodedCode], stop: StopFn) -> list[DecodedCode]:
    """Read unread boxes once more where the code itself is seen; return all codes.

    A detector's box may cut off a code's edge or be too wide for its views. A module grid that fitted well is searched again from there.
    """
    placed = []
    for box in boxes:
        if box.grid_score is None or _is_read(box, found):
            continue
        if stop():
            box.left_untried = True
        elif (place := code_evidence(grey, box.xyxy).place) is not None:
            placed.append((box, replace(box, xyxy=place)))
    found = read_views(grey, [at for _, at in placed], found, stop)
    tries = MAX_PLACED_TRIES
    for box, at in placed:
        fitted = box.grid_score is not None and box.grid_score >= MAX_WIDENED_SCORE
        if fitted and not _is_read(at, found):
            if not tries or stop():
                at.left_untried = True
            elif not at.left_untried:
                read = read_grid(grey, at.xyxy, 1, thorough=True)
                found, tries = _merged(found, read.codes), tries - (not read.codes)
        box.left_untried = at.left_untried
    return found


def classify_text(text: str) -> tuple[Kind, Payload | None, tuple[str, ...]]:
    """Classify a code's text: its kind, its payload if it is a payment code, and its faults.

    Blanks around a payload are named and passed over: its check value does not cover them.
    """
    bare = text.strip(" \t\r\n")
    if not bare.startswith("0002"):  # every EMVCo payload starts with tag 00 of length 02; a link is no damaged payload
        hidden = re.match(r"[\W_]*000201", bare) or ("000201" in bare and QRIS_GUID in bare.upper())
        return "other", None, (HIDDEN,) if hidden else ()
    blanks = (BLANKS_AROUND,) if bare != text else ()
    try:
        payload, problems = read_printed(bare)
    except QrisError as error:
        return "other", None, (*blanks, *map(str, error.problems))
    return ("qris" if payload.is_qris else "emvco"), payload, (*blanks, *map(str, problems))


def as_grey(image: Image) -> Grey:
    shape: tuple[int, ...] = getattr(image, "shape", ())
    kind = getattr(image, "dtype", type(image).__name__)
    if kind != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))):
        raise ValueError(f"need an image as a uint8 array (H, W, 3) RGB or (H, W) grey; got {kind} {shape}")
    if image.size == 0:
        return np.zeros((0, 0), np.uint8)
    flat = image[..., 0] if len(shape) == 3 and shape[2] == 1 else image
    return to_grey(np.ascontiguousarray(flat))


def detector_boxes(detections: Detections, shape: tuple[int, ...]) -> list[DetectorBox]:
    """Return the detector's boxes, clipped to the picture, surest first; empty ones are dropped."""
    xyxy = np.asarray(detections.boxes.xyxy, np.float64).reshape(-1, 4)
    confidence = np.asarray(detections.boxes.conf, np.float64).reshape(-1)
    height, width = shape
    clipped = np.clip(xyxy, 0, [width, height, width, height])
    boxes = [
        DetectorBox((float(x0), float(y0), float(x1), float(y1)), float(c), corners=corners)
        for (x0, y0, x1, y1), c, corners in zip(clipped, confidence, _corners_of(detections), strict=True)
        if x1 - x0 >= 2 and y1 - y0 >= 2
    ]
    return sorted(boxes, key=lambda box: -box.confidence)


def _corners_of(detections: Detections) -> list[Floats | None]:
    """Return the corners (4, 2) of each box's code, clockwise; None if missing or not convex."""
    points = detections.keypoints
    if points is None or points.shape[1] != 4:
        return [None] * len(detections.boxes.xyxy)
    quads = np.asarray(points[..., :2], np.float64)
    right = [bool(np.isfinite(quad).all()) and refusal_of_quadrilateral(quad) is None for quad in quads]
    return [np.asarray(clockwise(quad), np.float32) if fine else None for quad, fine in zip(quads, right, strict=True)]


def _inside(read: DecodedCode, box: Box) -> bool:
    x, y = read.centre
    return bool(box[0] <= x <= box[2] and box[1] <= y <= box[3])


def _is_read(box: DetectorBox, found: list[DecodedCode]) -> bool:
    return any(_inside(read, box.xyxy) for read in found)


def _overlap(box: DetectorBox, read: DecodedCode) -> float:
    """Compute intersection over union of a box and a code's hull."""
    (a0, b0, a1, b1), (c0, d0, c1, d1) = box.xyxy, _hull(read)
    shared = max(0.0, min(a1, c1) - max(a0, c0)) * max(0.0, min(b1, d1) - max(b0, d0))
    return shared / max((a1 - a0) * (b1 - b0) + (c1 - c0) * (d1 - d0) - shared, 1e-9)


def _holder(read: DecodedCode, boxes: list[DetectorBox]) -> DetectorBox | None:
    """Return the box around a code's centre that fits it best."""
    around = (box for box in boxes if _inside(read, box.xyxy))
    return max(around, key=lambda box: _overlap(box, read), default=None)


def _hull(read: DecodedCode) -> Box:
    (x0, y0), (x1, y1) = read.corners.min(0), read.corners.max(0)
    return float(x0), float(y0), float(x1), float(y1)


def _merged(known: list[DecodedCode], new: list[DecodedCode]) -> list[DecodedCode]:
    """Merge ``new`` codes into ``known``, without duplicates of equal text and place."""
    result = list(known)
    for read in new:
        twins = [other for other in result if other.text == read.text]
        if not any(_inside(read, _hull(other)) or _inside(other, _hull(read)) for other in twins):
            result.append(read)
    return result


def _read_enlarged(grey: Grey) -> list[DecodedCode]:
    """Read the whole picture at twice its size, sharpened; nothing if that would be too large."""
    if 2 * max(grey.shape) > MAX_UPSCALED_SIDE:
        return []
    height, width = grey.shape
    sharp = sharpened(
        grey, 1.5, 1
    )  # of a quarter of the pixels: views of boxes lose codes by this, the whole picture lost none
    return read_view(enlarged_crop(sharp, (0, 0, width, height), 0, lambda across, down: (2 * across, 2 * down)))


def code_of(read: DecodedCode | None, box: DetectorBox | None) -> Code:
    """Describe a decoded code, in the detector's box if it has one, or an unread box."""
    if read is not None:
        kind, payload, problems = classify_text(read.text)
        corners = tuple((float(x), float(y)) for x, y in read.corners)
        xyxy = box.xyxy if box else _hull(read)
        return Code(corners, xyxy, box.confidence if box else 1.0, read.text, kind, payload, problems)
    if box is None:
        raise ValueError("a code that was not read needs the box it was detected in")
    x0, y0, x1, y1 = box.xyxy
    problems = (NOT_TRIED if box.left_untried else NOT_READ,)
    return Code(((x0, y0), (x1, y0), (x1, y1), (x0, y1)), box.xyxy, box.confidence, problems=problems)


def _codes(found: list[DecodedCode], boxes: list[DetectorBox]) -> list[Code]:
    """List codes from left to right, each with its box; then the unread boxes."""
    codes = [code_of(read, _holder(read, boxes)) for read in found]
    codes.sort(key=lambda code: (code.box_xyxy_px[0], code.box_xyxy_px[1]))
    return codes + [code_of(None, box) for box in boxes if not _is_read(box, found)]
